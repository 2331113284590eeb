"""The reference policy follows the policy every few steps, and lasts over a restart."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.long_cases import cases
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner, random_rows
from tests.support.trainer_service.same_training import (
    differs_by,
    same_metrics,
)
from trainer_service.rows.rows import micro_batches
from trainer_service.settings import TrainerSettings
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

pytestmark = pytest.mark.numeric

ALGORITHM: dict[str, Any] = {"kl": {"estimator": "k2", "coefficient": 0.1, "reference_every_steps": 2}}
FAST = {"lr": 1e-2, "warmup_steps": 0}


def of_reference(learner: OneRankLearner) -> torch.Tensor:
    (batch,) = micro_batches(random_rows(9, 3), 1000)
    return learner.policy.reference(batch)


def of_policy(learner: OneRankLearner) -> torch.Tensor:
    (batch,) = micro_batches(random_rows(9, 3), 1000)
    return learner.policy.logprobs(batch)[0].detach()


@pytest.mark.parametrize("given", [{"zero_stage": 0}, {}, {"zero_stage": 3}, {"dtype": "bfloat16"}], ids=str)
def test_a_moved_reference_is_the_policy_of_then(make_learner: MakeLearner, given: dict[str, Any]) -> None:
    learner = make_learner(algorithm=ALGORITHM, optimizer=FAST, **given)
    base = of_policy(learner)
    assert torch.equal(of_reference(learner), base)
    learner.learn(1)
    assert torch.equal(of_reference(learner), base)
    learner.leader.move_reference()
    then = of_policy(learner)
    learner.learn(2)
    assert torch.equal(of_reference(learner), then)
    assert not torch.equal(then, base)
    assert not torch.equal(of_policy(learner), then)


@pytest.mark.parametrize(("saved", "read"), cases([(1, 1), (1, 3)], long=[(3, 1), (3, 3)]))
def test_a_checkpoint_brings_back_the_reference_at_any_stage(
    make_learner: MakeLearner, tmp_path: Path, saved: int, read: int
) -> None:
    before = make_learner(algorithm=ALGORITHM, optimizer=FAST, zero_stage=saved)
    base = of_reference(before)
    checkpoints = Checkpoints(tmp_path / "c", 3)
    before.learn(0)  # without a step, DeepSpeed cannot convert a checkpoint
    saved_checkpoint(checkpoints, before.leader, RunState(step=1, version=1))
    before.learn(1)
    before.leader.move_reference()
    then = of_reference(before)
    before.learn(2)
    saved_checkpoint(checkpoints, before.leader, RunState(step=2, version=2))

    after = make_learner(algorithm=ALGORITHM, optimizer=FAST, zero_stage=read)
    checkpoints.restore(after.leader)
    assert torch.equal(of_reference(after), then)
    told, again = before.learn(3), after.learn(3)
    assert again == (told if saved == read else same_metrics(told))
    checkpoints.load(after.leader, 1, 1.0)  # from before the reference moved
    assert torch.equal(of_reference(after), base)


def stepped(harness: Harness, group_id: str) -> dict[str, float]:
    harness.agents.group(group_id, [1.0, 0.0, 0.5], version=harness.trainer.version)
    assert harness.trainer.run_once()
    return dict(harness.shared_state.snapshot.metrics)


def test_the_trainer_moves_it_every_n_steps_also_over_restarts(make_harness: MakeHarness) -> None:
    through, cut = (
        make_harness(name, algorithm=ALGORITHM, optimizer=FAST).start() for name in ("through", "cut")
    )
    distances = [stepped(through, name)["kl/reference"] for name in "abcd"]
    found = []
    for name in "abcd":  # a restart after each step
        found.append(stepped(cut, name)["kl/reference"])
        cut = cut.restart()
    assert found == distances
    assert distances[0] == distances[2] == 0
    assert min(distances[1], distances[3]) > 0
    assert differs_by(through.weights(), cut.weights()) == 0


def test_adapters_have_no_moving_reference() -> None:
    with pytest.raises(ValueError, match=r"kl.reference_every_steps: with trainer.lora"):
        TrainerSettings(model_path=Path("m"), algorithm=ALGORITHM, lora={})
