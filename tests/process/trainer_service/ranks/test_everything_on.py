"""With everything on that large models need, ranks and restarts change what is learned by rounding only."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_service.expert_models import made_experts
from tests.support.trainer_service.random_rows import MakeLearner, with_experts
from tests.support.trainer_service.rank_learning import learned_alike, weights_of
from tests.support.trainer_service.rank_pair import RankPair
from tests.support.trainer_service.related_rows import related_rows
from tests.support.trainer_service.same_training import WELL_CONDITIONED, differs_by
from trainer_service.rows.rows import Row

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
    pair: RankPair,
    make_learner: MakeLearner,
    folder: Path,
    steps: list[list[Row]],
    both: dict[str, Any],
    on: dict[str, Any],
    sliced: int = 1,
) -> None:
    """Train on one rank with everything off, on two with everything on, and on two that restart after each
    step; assert that the first two learn alike, and the last two the same."""
    metrics = {}
    for name, cuts in {"straight": (), "cut": range(1, STEPS)}.items():
        given = {"one": OFF, "two": ON | on, "sliced": sliced, "cuts": cuts}
        _, told = learned_alike(pair, make_learner, folder / name, steps, COMMON | both, **given)
        metrics[name] = [each for part in told for each in part.metrics]
    assert metrics["cut"] == metrics["straight"]
    assert differs_by(weights_of(folder / "straight"), weights_of(folder / "cut")) == 0


@pytest.mark.long
@pytest.mark.parametrize("sliced", [1, 2])
def test_two_ranks_that_restart_learn_what_one_learns(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path, sliced: int
) -> None:
    steps = [groups(step) for step in range(STEPS)]
    learned(pair, make_learner, tmp_path, steps, {}, {"share_prefixes": True}, sliced)


@pytest.mark.long
def test_a_mixture_of_experts_as_well(pair: RankPair, make_learner: MakeLearner, tmp_path: Path) -> None:
    made_experts("Qwen3Moe", tmp_path / "base")
    steps = [with_experts(groups(step)) for step in range(STEPS)]
    both = {"model_path": tmp_path / "base", "router_replay": True}
    learned(pair, make_learner, tmp_path, steps, both, {})
