"""Two ranks learn from the same steps as one, and what they say and make of them is compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.support.trainer_service.random_rows import MakeLearner
from tests.support.trainer_service.rank_pair import RankPair
from tests.support.trainer_service.rank_tasks import Steps, Task, Told
from tests.support.trainer_service.recorded import assert_same_records
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    same_metrics,
)
from trainer_service.step.step_parts import StepRequest

Settings = dict[str, Any]
Metrics = list[dict[str, float]]


def weights_of(run: Path) -> Weights:
    weights: Weights = load_file(run / "weights.safetensors")
    return weights


def saved_step(run: Path) -> int:
    """The step of the checkpoint from which a restart continues."""
    current = run / "checkpoints" / "CURRENT"
    return int(current.read_text().rpartition("-")[2]) if current.exists() else 0


def learned_alike(
    pair: RankPair,
    make_learner: MakeLearner,
    run: Path,
    steps: Steps,
    both: Settings,
    *,
    one: Settings | None = None,
    two: Settings | None = None,
    sliced: int = 1,
    cuts: Sequence[int] = (),
    **task: Any,
) -> tuple[Metrics, list[Told]]:
    """Train the steps on one rank here, and on the pair, which restarts after each step of `cuts`. Assert
    that metrics, records and weights agree except for rounding, and return the metrics of the one, and the
    reports of the others. The settings are in `both`; those of `one` or `two` alone are beside them. `task`
    has more fields of the pair's task."""
    common = {"optimizer": WELL_CONDITIONED} | both
    alone = make_learner(**common | (one or {}))
    algorithm, before = alone.settings.algorithm, alone.exported()
    metrics, records = Metrics(), []
    for step, rows in enumerate(steps, 1):
        metrics.append(alone.leader.optimise(StepRequest(rows, 0, algorithm, recorded="all")))
        records.append(alone.leader.records)
        if (every := algorithm.kl.reference_every_steps) and step % every == 0:
            alone.leader.move_reference()
    settings = make_learner(**common | (two or {})).settings.model_copy(update={"sequence_parallel": sliced})
    told = [pair.learn(Task(run, settings, steps[:end], **task)) for end in (*cuts, len(steps))]
    differs = {"computed_per_token"} if one and "share_prefixes" in one else set[str]()
    for mine, theirs in zip([each for part in told for each in part.metrics], metrics, strict=True):
        same = {name: value for name, value in theirs.items() if name not in differs}
        assert {name: value for name, value in mine.items() if name not in differs} == same_metrics(same)
    for made, other in zip([each for part in told for each in part.records], records, strict=True):
        assert_same_records(made, other)
    assert_moved_alike(weights_of(run), alone.exported(), before, steps=max(4, 4 * len(cuts)))
    return metrics, told
