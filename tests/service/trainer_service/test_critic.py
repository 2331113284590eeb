"""A critic that learns beside the policy, and the advantages from its values."""

import math
from typing import Any

import pytest
import torch

from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.same_training import same_metrics
from trainer_service.settings import TrainerSettings

pytestmark = pytest.mark.numeric

CRITIC = {"optimizer": {"lr": 1e-2, "warmup_steps": 0}}
GENTLE = {"lr": 1e-4, "warmup_steps": 0}


def criticised(make_harness: MakeHarness, advantage: Any = "gae", **settings: Any) -> Harness:
    algorithm = {"advantage": advantage, "min_live_rows": 1} | settings.pop("algorithm", {})
    given: dict[str, Any] = {"algorithm": algorithm, "critic": CRITIC, "optimizer": GENTLE}
    return make_harness(**(given | settings)).start()


def lesson(harness: Harness, name: str) -> dict[str, float]:
    """Good answers begin with token 10, bad ones with 11, so that the first token predicts the reward."""
    for index, (first, value) in enumerate(((10, 1.0), (11, 0.0)) * 2):
        output = [first, 20, 21, 1]
        harness.agents.episode(f"{name}-{index}", value, output_ids=output, version=harness.trainer.version)
    assert harness.trainer.run_once()
    return harness.shared_state.snapshot.metrics


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
def test_a_critic_learns_to_predict_rewards(name: str, make_harness: MakeHarness) -> None:
    harness = criticised(make_harness, name)
    said = [lesson(harness, f"l{step}") for step in range(12)]
    assert said[0]["critic/value_mean"] == 0.0  # before training, all values are 0
    assert said[-1]["critic/loss"] < 0.5 * said[0]["critic/loss"]
    assert all(math.isfinite(value) for metrics in said for value in metrics.values())
    if name == "gae":  # with turn_gae, a turn has the value that was computed before its first token
        assert said[-1]["critic/explained_variance"] > 0.3 > said[0]["critic/explained_variance"]


def test_a_restart_goes_on_with_the_same_critic(make_harness: MakeHarness) -> None:
    """The result is bitwise equal to that of a run without a restart."""
    through, cut = criticised(make_harness, name="through"), criticised(make_harness, name="cut")
    for harness in (through, cut):
        lesson(harness, "a")
        lesson(harness, "b")
    again = cut.restart()
    ends = [lesson(harness, "c") for harness in (through, again)]
    for metric in ("critic/loss", "critic/value_mean", "critic/grad_norm", "loss", "grad_norm"):
        assert ends[0][metric] == ends[1][metric], metric
    weights = [
        torch.cat([each.flatten() for each in harness.policy.critic.module.parameters()])
        for harness in (through, again)
    ]
    assert torch.equal(*weights)


def test_a_trainer_with_a_critic_refuses_a_checkpoint_without_one(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    with pytest.raises(Exception, match="it was trained without trainer"):
        criticised(make_harness)


def test_a_critic_learns_the_same_from_any_micro_batches(make_harness: MakeHarness) -> None:
    ends = []
    for max_tokens in (1, 10_000):
        harness = criticised(make_harness, name=f"run-{max_tokens}", algorithm={"max_tokens": max_tokens})
        lesson(harness, "a")
        ends.append(lesson(harness, "b"))
    names = ("critic/loss", "critic/grad_norm", "adv/std", "loss", "grad_norm")
    one, other = ({name: end[name] for name in names} for end in ends)
    assert one == same_metrics(other)


@pytest.mark.parametrize(
    ("advantage", "critic", "sentence"),
    [
        ("gae", None, "advantage gae needs a critic; set it"),
        ("drgrpo", {}, "advantage drgrpo uses no critic"),
    ],
)
def test_a_setting_that_needs_a_critic_is_refused_without_one(
    advantage: str, critic: Any, sentence: str, make_harness: MakeHarness
) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainerSettings(model_path="m", algorithm={"advantage": advantage}, critic=critic)
