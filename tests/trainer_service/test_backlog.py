"""The trainer's report of its backlog, by which gateways admit only as many sessions as it trains in time."""

import pytest

from tests.support.trainer_service.harness import Harness, MakeHarness


def wait(harness: Harness) -> None:
    """Run the trainer's loop once without a step, after a heartbeat that reports at once."""
    harness.heartbeat.note(harness.trainer.step, harness.trainer.version)
    assert not harness.trainer.run_once()


def said(harness: Harness, *names: str) -> list[float]:
    return [float(harness.stream.trainer[f"rollouts_{name}"]) for name in names]


def test_before_the_first_step_one_is_expected_to_take_what_it_needs_at_least(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(algorithm={"min_live_rows": 6}).start()
    wait(harness)
    assert said(harness, "waiting", "owed", "per_step") == [0, 0, 6]


def test_what_has_ended_waits_until_a_step_takes_it(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"min_live_rows": 4}).start()
    harness.agents.group("g", [1.0, 0.0])
    harness.agents.open("running")
    wait(harness)
    assert said(harness, "waiting") == [2]
    harness.agents.group("h", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert said(harness, "waiting", "owed") == [0, 0]


def test_the_use_of_a_step_counts_what_taught_nothing(harness: Harness) -> None:
    harness.agents.group("equal", [1.0, 1.0, 1.0])
    harness.agents.group("live", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert said(harness, "per_step") == [
        pytest.approx((2 + 5) / 2)
    ]  # the mean of the first estimate and of what the step used


def test_what_no_checkpoint_contains_yet_is_owed(make_harness: MakeHarness) -> None:
    harness = make_harness(checkpoint_every_steps=2).start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert said(harness, "waiting", "owed") == [0, 2]
    harness.agents.group("h", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert said(harness, "owed") == [0]
