"""Two real ranks make steps of several kinds as a single rank does."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.trainer_service.random_rows import MakeLearner, in_groups, random_rows, taught
from tests.support.trainer_service.rank_pair import RankPair
from tests.support.trainer_service.rank_tasks import Task
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    same_metrics,
)
from trainer_service.step.step_request import StepRequest

pytestmark = pytest.mark.numeric

MOVING: dict[str, Any] = {"kl": {"estimator": "k2", "coefficient": 0.1, "reference_every_steps": 2}}
TAUGHT: dict[str, Any] = {"loss": {"name": "forward_kl", "top_k": 3}, "max_tokens": 64}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_two_ranks_move_the_reference_as_one_does_and_continue_with_it(
    pair: RankPair, make_learner: MakeLearner, untrained: Weights, tmp_path: Path, stage: int
) -> None:
    steps = [random_rows(seed, 5) for seed in range(4)]
    common = {"algorithm": MOVING, "optimizer": WELL_CONDITIONED}
    one = make_learner(**common)
    alone = []
    for step, rows in enumerate(steps, 1):
        alone.append(one.leader.optimise(StepRequest(rows, 0, one.settings.algorithm)))
        if step == 2:
            one.leader.move_reference()
    settings = make_learner(**common, zero_stage=stage).settings
    run = tmp_path / "two"
    first = pair.learn(Task(run, settings, steps[:3])).metrics
    rest = pair.learn(Task(run, settings, steps)).metrics  # another process, from the checkpoint
    assert [*first, *rest] == [same_metrics(told) for told in alone]
    assert_moved_alike(load_file(run / "weights.safetensors"), one.exported(), untrained)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_two_ranks_make_the_updates_of_mini_batches_as_one_does(
    pair: RankPair, make_learner: MakeLearner, untrained: Weights, tmp_path: Path, stage: int
) -> None:
    """Two epochs over two mini-batches are four updates."""
    rows = in_groups(1, [2, 3, 2, 1])
    given: dict[str, Any] = {
        "optimizer": WELL_CONDITIONED,
        "algorithm": {"mini_batches": 2, "epochs": 2, "max_tokens": 64},
    }
    one = make_learner(**given)
    told = one.leader.optimise(StepRequest(rows, 0, one.settings.algorithm))
    run = tmp_path / "two"
    of_two = pair.learn(Task(run, make_learner(zero_stage=stage, **given).settings, [rows]))
    assert of_two.metrics == [same_metrics(told)]
    assert_moved_alike(load_file(run / "weights.safetensors"), one.exported(), untrained)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"zero_stage": 1}, marks=pytest.mark.long),
        pytest.param({"zero_stage": 3}, marks=pytest.mark.long),
        {"sequence_parallel": 2},
    ],
    ids=str,
)
def test_two_ranks_learn_from_a_teachers_tokens_what_one_learns(
    pair: RankPair, make_learner: MakeLearner, untrained: Weights, tmp_path: Path, given: dict[str, Any]
) -> None:
    steps = [taught(1, 6, 3), taught(2, 1, 3)]
    common = {"optimizer": WELL_CONDITIONED, "algorithm": TAUGHT, "teacher": {"url": "http://teacher"}}
    one = make_learner(**common)
    alone = [one.leader.optimise(StepRequest(rows, 0, one.settings.algorithm)) for rows in steps]
    settings = make_learner(**common).settings.model_copy(update=given)
    together = pair.learn(Task(tmp_path / "two", settings, steps)).metrics
    assert together == [same_metrics(told) for told in alone]
    assert_moved_alike(load_file(tmp_path / "two" / "weights.safetensors"), one.exported(), untrained)
