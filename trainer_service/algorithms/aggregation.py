"""What each token's loss counts in the sum over an optimizer step, whatever micro-batch it lies in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import (
    Aggregation,
)


@dataclass(frozen=True)
class StepCounts:
    """How many trained tokens the R rows of an optimizer step have, on all ranks, or those of a part of it,
    made of whole groups (see `divisor`). They are counted before anything is masked: a denominator of
    survivors would grow the others' gradient (spec §0)."""

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
    return _own(counts, aggregation) / divisor(counts, aggregation)


def divisor(counts: StepCounts, aggregation: Aggregation) -> int:
    """What the whole step divides its sum by. All else of a weight is known of a group alone: so the weights
    in a part of a step, made of whole groups, are those in the step but for the divisors of the two."""
    match aggregation.mode:
        case "token_mean":
            count = counts.tokens
        case "seq_mean_token_mean" | "seq_mean_token_sum" | "seq_mean_token_sum_norm":
            count = int((counts.tokens_R > 0).sum())
        case "prompt_mean":
            count = _trained(counts.tokens_R, counts.group_R)
        case "rollout_mean":
            count = _trained(counts.tokens_R, counts.rollout_R)
        case "token_sum" | "fixed_denominator":
            count = 1
    return max(1, count)


def _own(counts: StepCounts, aggregation: Aggregation) -> Tensor:
    """[R] What a row's own group says of its tokens' weight."""
    tokens_R = counts.tokens_R.double()
    match aggregation.mode:
        case "token_mean" | "token_sum" | "seq_mean_token_sum":
            return torch.ones_like(tokens_R)
        case "seq_mean_token_mean":
            return 1 / tokens_R.clamp(min=1)
        case "seq_mean_token_sum_norm":
            return torch.ones_like(tokens_R) / _given(aggregation.horizon)
        case "prompt_mean":
            return 1 / _tokens_of(tokens_R, counts.group_R)[counts.group_R].clamp(min=1)
        case "rollout_mean":
            return 1 / _tokens_of(tokens_R, counts.rollout_R)[counts.rollout_R].clamp(min=1)
        case "fixed_denominator":
            return torch.ones_like(tokens_R) / _given(aggregation.denominator)


def _tokens_of(tokens_R: Tensor, owners_R: Tensor) -> Tensor:
    """[K] Of each owner, whatever rows it has."""
    return torch.bincount(owners_R, weights=tokens_R.double())


def _trained(tokens_R: Tensor, owners_R: Tensor) -> int:
    """How many owners have a trained token."""
    return int((_tokens_of(tokens_R, owners_R) > 0).sum())


def _given(length: float | None) -> float:
    assert length is not None, "Aggregation refuses a mode without its length"  # noqa: S101
    return length
