"""What each token's loss counts in the sum over an optimizer step, whatever micro-batch it lies in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_service.algorithms.loss_settings import (
    Aggregation,
)


@dataclass(frozen=True)
class StepCounts:
    """How many trained tokens the R rows of a whole optimizer step have, on all ranks. They are counted
    before anything is masked: a denominator of survivors would grow the others' gradient (spec §0)."""

    tokens_R: Tensor
    """Of each row; int64."""
    rollout_R: Tensor
    """The rollout that a row belongs to; its forks share it. int64, from 0."""
    group_R: Tensor
    """The group of its rollout; int64, from 0."""

    @classmethod
    def of(cls, rows_T: Tensor, rollout_R: Tensor, group_R: Tensor) -> "StepCounts":
        """`rows_T` has every trained token of the step."""
        return cls(torch.bincount(rows_T, minlength=len(rollout_R)), rollout_R, group_R)

    def __post_init__(self) -> None:
        if not len(self.tokens_R) == len(self.rollout_R) == len(self.group_R):
            raise ValueError(
                f"{len(self.tokens_R)} rows have tokens, {len(self.rollout_R)} a rollout and "
                f"{len(self.group_R)} a group"
            )

    @property
    def tokens(self) -> int:
        return int(self.tokens_R.sum())


def row_weights(counts: StepCounts, aggregation: Aggregation) -> Tensor:
    """The weight of each token of a row, float64 [R]: the loss of the step is the sum of weight · loss
    (spec §5; `agg.*`). Rows, rollouts and groups without a trained token are not counted."""
    return _share(counts, aggregation) * torch.ones_like(counts.tokens_R, dtype=torch.float64)


def _share(counts: StepCounts, aggregation: Aggregation) -> Tensor | float:
    tokens_R = counts.tokens_R.double()
    live_rows = max(1, int((tokens_R > 0).sum()))
    match aggregation.mode:
        case "token_mean":
            return 1 / max(1, counts.tokens)
        case "token_sum":
            return 1.0
        case "seq_mean_token_mean":
            return 1 / tokens_R.clamp(min=1) / live_rows
        case "seq_mean_token_sum":
            return 1 / live_rows
        case "seq_mean_token_sum_norm":
            return 1 / live_rows / _given(aggregation.horizon)
        case "prompt_mean":
            return _mean_of(tokens_R, counts.group_R)
        case "rollout_mean":
            return _mean_of(tokens_R, counts.rollout_R)
        case "fixed_denominator":
            return 1 / _given(aggregation.denominator)


def _mean_of(tokens_R: Tensor, owners_R: Tensor) -> Tensor:
    """1 / tokens of the owner / owners that have any."""
    tokens_K = torch.bincount(owners_R, weights=tokens_R)
    return 1 / tokens_K[owners_R].clamp(min=1) / (tokens_K > 0).sum().clamp(min=1)


def _given(length: float | None) -> float:
    assert length is not None, "Aggregation refuses a mode without its length"  # noqa: S101
    return length
