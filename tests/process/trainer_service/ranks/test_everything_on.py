"""With everything on that large models need, ranks and restarts change what is learned by rounding only."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.trainer_service.expert_models import made_experts
from tests.support.trainer_service.random_rows import MakeLearner, with_experts
from tests.support.trainer_service.rank_pair import RankPair
from tests.support.trainer_service.rank_tasks import Task
from tests.support.trainer_service.related_rows import related_rows
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    differs_by,
    same_metrics,
)
from trainer_service.rows.rows import Row
from trainer_service.step.step_request import StepRequest

pytestmark = pytest.mark.numeric

COMMON: dict[str, Any] = {
    "optimizer": WELL_CONDITIONED,
    "critic": {"optimizer": WELL_CONDITIONED},
    "algorithm": {
        "advantage": "gae",
        "kl": {"coefficient": 0.1, "reference_every_steps": 2},
        "mini_batches": 2,
        "epochs": 2,
        "max_tokens": 150,
    },
}
"""What both trainings compute."""
ON: dict[str, Any] = {"zero_stage": 3, "activation_checkpointing": True}
OFF: dict[str, Any] = {"zero_stage": 1, "activation_checkpointing": False, "share_prefixes": False}
STEPS = 4


def groups(step: int) -> list[Row]:
    """The rows of two groups, whose members share prefixes."""
    rows = related_rows(roots=2, branches=1, tips=3, seed=step)
    return [replace(row, group_id=str(tuple(row.ids_L[:4]))) for row in rows]


def learned(
    pair: RankPair, make_learner: MakeLearner, folder: Path, on: dict[str, Any], steps: list[list[Row]]
) -> None:
    """Train on one rank with everything off, on two with everything on, and on two that restart after each
    step; assert that the first two learn alike, and the last two the same."""
    one = make_learner(
        **COMMON, **OFF, **{name: on[name] for name in ("model_path", "router_replay") if name in on}
    )
    before, alone = one.exported(), []
    for step, rows in enumerate(steps, 1):
        alone.append(one.leader.optimise(StepRequest(rows, 0, one.settings.algorithm)))
        if step % 2 == 0:
            one.leader.move_reference()
    sliced = on.get("sequence_parallel", 1)
    made = make_learner(**COMMON, **ON, **(on | {"sequence_parallel": 1})).settings
    settings = made.model_copy(update={"sequence_parallel": sliced})
    straight = pair.learn(Task(folder / "straight", settings, steps)).metrics
    cut = [pair.learn(Task(folder / "cut", settings, steps[:end])).metrics for end in range(1, STEPS + 1)]
    for told, of_one in zip(straight, alone, strict=True):
        same = {name: value for name, value in of_one.items() if name != "computed_per_token"}
        assert {name: told[name] for name in same} == same_metrics(same)
    ends: list[Weights] = [load_file(folder / name / "weights.safetensors") for name in ("straight", "cut")]
    assert_moved_alike(ends[0], one.exported(), before, steps=4 * STEPS)
    assert [told for each in cut for told in each] == straight
    assert differs_by(*ends) == 0


@pytest.mark.long
@pytest.mark.parametrize("sliced", [1, 2])
def test_two_ranks_that_restart_learn_what_one_learns(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, sliced: int
) -> None:
    steps = [groups(step) for step in range(STEPS)]
    learned(pair, make_learner, tmp_path, {"share_prefixes": True, "sequence_parallel": sliced}, steps)


@pytest.mark.long
def test_a_mixture_of_experts_as_well(pair: RankPair, make_learner: MakeLearner, tmp_path: Path) -> None:
    made_experts("Qwen3Moe", tmp_path / "base")
    steps = [with_experts(groups(step)) for step in range(STEPS)]
    on = {"model_path": tmp_path / "base", "router_replay": True}
    learned(pair, make_learner, tmp_path, on, steps)
