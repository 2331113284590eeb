"""A run of an experiment on the real stack, with a second engine that keeps the first model."""

from pathlib import Path

import pytest

from results.experiment import Experiment, Say, Variant
from results.figures import WINDOW
from results.trial import Place, run
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.long


def tiny_model(models: Path, say: Say) -> Path:
    return make_tiny_model(models / "tiny")


LONGER = Experiment(
    name="longer",
    question="Does a model learn to say more than its first self?",
    warm_start="random weights",
    model=tiny_model,
    run={
        "environment": "python:tests.support.environments.toys:Longer",
        "sampling": {"max_tokens": 4},
        "episodes": 1024,
        "group_size": 4,
    },
    target=-1.0,
    variants={"frozen": Variant("the opponent is the first model", run={"opponent": "policy@0"})},
    services={"trainer": {"algorithm": {"min_live_rows": 8}}},
    judged={"opponent": "policy@0", "tasks": 16, "group_size": 1},
    against_first=True,
)


def test_a_run_trains_against_the_first_model_and_says_what_it_took(tmp_path: Path) -> None:
    lines: list[str] = []
    result = run(LONGER, "frozen", 0, Place(tmp_path / "work", tmp_path), lines.append)
    assert result.spent.episodes == 1024
    first = result.reached(LONGER.target)
    assert first is not None
    assert first.episodes == WINDOW, "the target is below every mean"
    assert 0 < first.cpu_s < result.spent.cpu_s
    assert result.versions >= 1, "nothing was served, so the opponent was the policy itself"
    assert result.verdicts["trained"] > 0
    assert result.verdicts.get("failed", 0) == 0
    assert result.after.low <= result.after.mean <= result.after.high
    assert -1 <= result.after.mean <= 1, "the interval around it may reach beyond the rewards"
