"""How far a step moved the policy, told by the policy itself."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.trainer_service.random_rows import MakePupil, Pupil, random_rows
from trainer_service.batch import Row, micro_batches

QUICKLY = {"lr": 3e-2, "warmup_steps": 0}


@torch.no_grad()
def logprobs(pupil: Pupil, rows: Sequence[Row]) -> torch.Tensor:
    """Of each row's tokens alone, row after row."""
    alone = [next(micro_batches([row], 10_000)) for row in rows]
    return torch.cat([pupil.policy.logprobs(batch)[0] for batch in alone]).double()


def learn(pupil: Pupil, rows: Sequence[Row]) -> dict[str, float]:
    return pupil.leader.optimise(rows, 0, pupil.settings.algorithm)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_what_the_tokens_were_worth_before_and_are_worth_after(
    make_pupil: MakePupil, stage: int, epochs: int
) -> None:
    rows = random_rows(1, 12)
    room = sum(len(row) for row in rows)  # for all of them
    pupil = make_pupil(zero_stage=stage, optimizer=QUICKLY, algorithm={"max_tokens": room, "epochs": epochs})
    before = logprobs(pupil, rows)
    told = learn(pupil, rows)
    moved = logprobs(pupil, rows) - before
    assert told["update/abs_logp"] == pytest.approx(float(moved.abs().mean()), rel=1e-4)
    assert told["update/kl"] == pytest.approx(float((moved.exp() - 1 - moved).mean()), rel=1e-4)
    assert told["update/kl"] > 1e-3


def test_a_large_step_tells_it_of_every_nth_row_and_learns_early_all_the_same(make_pupil: MakePupil) -> None:
    rows = random_rows(2, 24)
    room = sum(len(row) for row in rows) // 3
    pupil, early = (make_pupil(optimizer=QUICKLY, algorithm={"max_tokens": room}) for _ in range(2))
    before = logprobs(pupil, rows[::3])
    told = learn(pupil, rows)
    moved = logprobs(pupil, rows[::3]) - before
    assert told["update/abs_logp"] == pytest.approx(float(moved.abs().mean()), rel=1e-4)
    early.leader.accumulate(rows[:7], 0, early.settings.algorithm)
    parted = early.leader.optimise(rows[7:], 0, early.settings.algorithm)
    assert _updates(parted) == pytest.approx(_updates(told), rel=1e-3)


def test_a_step_that_changes_nothing_has_moved_nothing(make_pupil: MakePupil) -> None:
    told = learn(make_pupil(optimizer={"lr": 0.0, "warmup_steps": 0}), random_rows(3, 6))
    assert _updates(told) == {"update/abs_logp": 0.0, "update/kl": 0.0}


def _updates(told: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in told.items() if name.startswith("update/")}
