"""Computes the weight of each token's loss in the step's sum, whatever micro-batch the token is in."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trainer_service.algorithms.setting_choices import Frozen


class Aggregation(Frozen):
    """The weight of each token in the sum over the optimizer step."""

    mode: Literal[
        "token_mean",
        "token_sum",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
        "prompt_mean",
        "rollout_mean",
        "fixed_denominator",
    ] = "token_mean"
    horizon: float | None = Field(None, gt=0)
    """The number of tokens by which `seq_mean_token_sum_norm` divides the sum of each row."""
    denominator: float | None = Field(None, gt=0)
    """The number of tokens by which `fixed_denominator` divides the sum of the step."""

    @model_validator(mode="after")
    def _length_fits(self) -> "Aggregation":
        for mode, field in (("seq_mean_token_sum_norm", "horizon"), ("fixed_denominator", "denominator")):
            if (getattr(self, field) is not None) != (self.mode == mode):
                raise ValueError(f"aggregation: {field} belongs to {mode}, which needs it")
        return self


@dataclass(frozen=True)
class StepCounts:
    """The numbers of trained tokens of R rows, on all ranks. The rows are those of an optimizer step, or of
    some whole groups of it (see `divisor`).

    Masked tokens count too. Otherwise a mask would increase the weight of the tokens that it keeps."""

    tokens_R: Tensor
    """The trained tokens of each row; int64."""
    rollout_R: Tensor
    """The rollout of each row, numbered from 0; int64."""
    group_R: Tensor
    """The group of each row's rollout, numbered from 0; int64."""

    def __post_init__(self) -> None:
        if not len(self.tokens_R) == len(self.rollout_R) == len(self.group_R):
            raise ValueError(
                f"tokens_R has {len(self.tokens_R)} rows, rollout_R {len(self.rollout_R)} and "
                f"group_R {len(self.group_R)}"
            )

    @property
    def tokens(self) -> int:
        return int(self.tokens_R.sum())

    def of_rows(self, at: Tensor) -> "StepCounts":
        """The counts of the rows at these indices alone. The rows keep their numbers."""
        kept_R = torch.zeros_like(self.tokens_R).index_fill(0, at, 1)
        return replace(self, tokens_R=self.tokens_R * kept_R)


def row_weights(counts: StepCounts, aggregation: Aggregation) -> Tensor:
    """[R] float64: the weight of each token of a row. The loss of the step is the sum of weight · loss over
    its tokens (the golden cases `agg.*`). Rows, rollouts and groups without a trained token do not count."""
    return _own(counts, aggregation) / divisor(counts, aggregation)


def divisor(counts: StepCounts, aggregation: Aggregation) -> int:
    """The number by which the whole step divides its sum. All other factors of a weight depend on a single
    group. So if a part of a step has only whole groups, its weights and the step's weights differ only by the
    ratio of the two divisors."""
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
    """[R] float64: the factor of a token's weight that depends on the row's own group only."""
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
    """[K] The trained tokens of each rollout or group, over all of its rows."""
    return torch.bincount(owners_R, weights=tokens_R.double())


def _trained(tokens_R: Tensor, owners_R: Tensor) -> int:
    """The number of rollouts or groups with a trained token."""
    return int((_tokens_of(tokens_R, owners_R) > 0).sum())


def _given(length: float | None) -> float:
    assert length is not None, "Aggregation refuses a mode without its length"  # noqa: S101
    return length
