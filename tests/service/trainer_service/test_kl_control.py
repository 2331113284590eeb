"""The coefficient of the KL penalty follows a target."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tolerances import FLOAT64, ulps
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.same_training import differs_by
from trainer_service.algorithms.kl import adapted_coefficient

pytestmark = pytest.mark.numeric

CONTROLLED: dict[str, Any] = {"estimator": "k2", "coefficient": 0.5, "target": 0.001, "horizon": 20}


@pytest.mark.parametrize(
    ("measured", "rollouts", "wanted"),
    [
        (6.0, 256, 0.1),  # at the target
        (6.6, 256, 0.1 * (1 + 0.1 * 0.0256)),  # 10 % above it
        (12.0, 256, 0.1 * (1 + 0.2 * 0.0256)),  # the error counts as 20 %
        (0.0, 256, 0.1 * (1 - 0.2 * 0.0256)),
        (5.4, 10_000, 0.1 * 0.9),
        (0.0, 10**6, 0.1 * 0.8),  # a step counts at most as the horizon
    ],
)
def test_the_coefficient_follows_the_proportional_controller(
    measured: float, rollouts: int, wanted: float
) -> None:
    """Target 6 and horizon 10,000 are those of Ziegler et al. 2019."""
    found = adapted_coefficient(0.1, measured, target=6.0, horizon=10_000, rollouts=rollouts)
    assert found == pytest.approx(wanted, rel=ulps(8, unit=FLOAT64))


@given(
    st.floats(1e-6, 1e3), st.floats(0, 1e9), st.floats(1e-6, 1e3), st.floats(0.1, 1e6), st.integers(1, 10**6)
)
def test_a_coefficient_stays_above_0_and_moves_towards_the_target(
    coefficient: float, measured: float, target: float, horizon: float, rollouts: int
) -> None:
    found = adapted_coefficient(coefficient, measured, target=target, horizon=horizon, rollouts=rollouts)
    assert 0 < found < 2 * coefficient
    assert (found - coefficient) * (measured - target) >= 0


def stepped(harness: Harness, group_id: str) -> dict[str, float]:
    harness.agents.group(group_id, [1.0, 0.0, 0.5], version=harness.trainer.version)
    assert harness.trainer.run_once()
    return dict(harness.shared_state.snapshot.metrics)


def test_a_restart_goes_on_with_the_same_coefficient(make_harness: MakeHarness) -> None:
    """The result is bitwise equal to that of a run without a restart."""
    through, cut = (
        make_harness(name, algorithm={"kl": CONTROLLED}, optimizer={"lr": 1e-3, "warmup_steps": 0}).start()
        for name in ("through", "cut")
    )
    for harness in (through, cut):
        first, second = stepped(harness, "a"), stepped(harness, "b")
        assert first["kl/reference"] == 0  # the weights are still those of the reference
        assert first["kl/coefficient"] == 0.5
        assert second["kl/coefficient"] == adapted_coefficient(0.5, 0.0, target=0.001, horizon=20, rollouts=3)
        assert second["kl/reference"] > 0.0012
    again = cut.restart()
    ends = [stepped(harness, "c") for harness in (through, again)]
    assert ends[0]["kl/coefficient"] == ends[1]["kl/coefficient"] == second["kl/coefficient"] * 1.03
    assert ends[0]["loss"] == ends[1]["loss"]
    assert differs_by(through.weights(), again.weights()) == 0


def test_without_a_target_the_coefficient_stays(make_harness: MakeHarness) -> None:
    algorithm = {"kl": {"estimator": "k2", "coefficient": 0.5}}
    harness = make_harness(algorithm=algorithm).start()
    assert [stepped(harness, name)["kl/coefficient"] for name in "ab"] == [0.5, 0.5]


def test_the_loss_has_the_coefficient_of_its_step(make_harness: MakeHarness) -> None:
    """In the first step the KL and its gradient are 0, so both runs have the same weights after it."""
    fixed = {"estimator": "k2", "coefficient": 0.5}
    controlled, still = (
        make_harness(name, algorithm={"kl": kl}, optimizer={"lr": 1e-2, "warmup_steps": 0}).start()
        for name, kl in (("controlled", CONTROLLED), ("still", fixed))
    )
    for harness in (controlled, still):
        stepped(harness, "a")
    one, other = stepped(controlled, "b"), stepped(still, "b")
    assert one["kl/reference"] == other["kl/reference"] > 0.01
    wanted = (one["kl/coefficient"] - 0.5) * one["kl/reference"]
    assert one["loss"] - other["loss"] == pytest.approx(wanted, rel=1e-3)
