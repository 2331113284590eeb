"""Masks and corrections for tokens to which trainer and engine give different probabilities.

rho = exp(log_rho) with log_rho = lp_prox - lp_roll, in nats: a token's log-probability before the step, minus
that with which the engine sampled it.

A mask leaves tokens or whole rows out of the loss: [T] bool, True keeps a token. A mask of rows needs all
tokens of a row. They are always in one micro-batch, so the result does not depend on how rows are packed. The
bound of M2PO is computed over the whole step. A correction is a weight that multiplies the loss of its token.

Names in backticks with a dot, such as `mask.geo_seq`, are cases of `algorithms_golden.json` in the tests.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from trainer_service.algorithms.setting_choices import Above0, AtLeast0, Frozen, Within, by_name
from trainer_service.algorithms.tokens import Anchor, RowIndex, Tokens, bernoulli_kl, bounded


@dataclass(frozen=True)
class TokenWeights:
    """The weights of T tokens."""

    weight_T: Tensor
    kept_T: Tensor
    """bool: False for a token that the correction left out, with weight 0."""
    capped_T: Tensor
    """bool: True for a ratio that reached the cap."""

    @classmethod
    def capped(cls, rho_T: Tensor, cap: float) -> "TokenWeights":
        return cls(rho_T.clamp(max=cap), torch.ones_like(rho_T, dtype=torch.bool), rho_T >= cap)

    def normalised(self, mean: float) -> "TokenWeights":
        """The weights, divided by the step's mean weight (`is.tis_token_2_batchnorm`)."""
        return replace(self, weight_T=self.weight_T / mean)

    def mean(self, kept_T: Tensor, rows_T: Tensor | None = None) -> float:
        """The mean weight of the kept tokens of the whole step. If the tokens of a row share one weight, pass
        `rows_T`: then the mean is over rows. The result is 1 if no token is kept or all weights are 0."""
        weight_T = self.weight_T[kept_T].double()
        if rows_T is not None:
            weight_T = RowIndex.of(rows_T[kept_T]).mean(weight_T)
        mean = float(weight_T.mean()) if len(weight_T) else 0.0
        return mean if mean > 0 else 1.0


class NoCorrection(Frozen):
    corrects: ClassVar[bool] = False
    by_row: ClassVar[bool] = False
    normalise: ClassVar[bool] = False

    name: Literal["none"] = "none"

    def weigh(self, tokens: Tokens) -> TokenWeights:
        """Gives every token the weight 1."""
        kept_T = torch.ones_like(tokens.log_rho, dtype=torch.bool)
        return TokenWeights(torch.ones_like(tokens.log_rho), kept_T, ~kept_T)


class TisToken(Frozen):
    corrects: ClassVar[bool] = True
    by_row: ClassVar[bool] = False

    name: Literal["tis_token"] = "tis_token"
    cap: Above0 = 2.0
    normalise: bool = False
    """Divide the weights by their mean over the whole step."""

    def weigh(self, tokens: Tokens) -> TokenWeights:
        """min(rho, cap): truncated importance sampling (Ionides 2008). With `ppo` and a cap of 5 it is
        decoupled PPO in mode `clamp` (`is.tis_token_2`, `loss.decoupled_ppo_clamp5`)."""
        return TokenWeights.capped(bounded(tokens.log_rho).exp(), self.cap)


class TisSequence(Frozen):
    corrects: ClassVar[bool] = True
    by_row: ClassVar[bool] = True
    """All tokens of a row have the same weight."""

    name: Literal["tis_sequence"] = "tis_sequence"
    cap: Above0 = 5.0
    normalise: bool = False

    def weigh(self, tokens: Tokens) -> TokenWeights:
        """min(product of the rho of the row, cap), for each token of the row (`is.tis_seq_5`)."""
        rows = RowIndex.of(tokens.rows_T)
        return TokenWeights.capped(rows.at_tokens(bounded(rows.sum(tokens.log_rho)).exp()), self.cap)


class Icepop(Within):
    corrects: ClassVar[bool] = True
    by_row: ClassVar[bool] = False

    name: Literal["icepop"] = "icepop"
    low: AtLeast0 = 0.5
    high: Above0 = 5.0
    normalise: bool = False

    def weigh(self, tokens: Tokens) -> TokenWeights:
        """rho within [low, high], and 0 outside (IcePop; `is.icepop_0.5_5`). With `ppo` and bounds of 0 and 5
        it is decoupled PPO in mode `mask` (`loss.decoupled_ppo_mask5`)."""
        rho_T = bounded(tokens.log_rho).exp()
        kept_T = (rho_T >= self.low) & (rho_T <= self.high)
        weight_T = torch.where(kept_T, rho_T, torch.zeros_like(rho_T))
        return TokenWeights(weight_T, kept_T, torch.zeros_like(kept_T))


Correction = Annotated[
    NoCorrection | TisToken | TisSequence | Icepop,
    Field(discriminator="name"),
    BeforeValidator(by_name),
]


class _OfRows(Within):
    """Keeps or drops whole rows by ratios from `low` to `high`."""

    of_rows: ClassVar[bool] = True
    whole_step: ClassVar[bool] = False

    def keeps(self, log_ratio: Tensor) -> Tensor:
        ratio = bounded(log_ratio).exp()
        return (ratio >= self.low) & (ratio <= self.high)


class Geometric(_OfRows):
    name: Literal["geometric"] = "geometric"
    low: AtLeast0 = 0.99
    high: Above0 = 1.01

    def kept(self, tokens: Tokens, _m2_bound: float) -> Tensor:
        """Keeps rows with low <= exp(mean of log_rho) <= high (`mask.geo_seq`)."""
        rows = RowIndex.of(tokens.rows_T)
        return rows.at_tokens(self.keeps(rows.mean(tokens.log_rho)))


class Product(_OfRows):
    name: Literal["product"] = "product"
    low: AtLeast0 = 0.5
    high: Above0 = 2.0

    def kept(self, tokens: Tokens, _m2_bound: float) -> Tensor:
        """Keeps rows with low <= product of rho <= high (`mask.product_seq`)."""
        rows = RowIndex.of(tokens.rows_T)
        return rows.at_tokens(self.keeps(rows.sum(tokens.log_rho)))


class Outlier(_OfRows):
    name: Literal["outlier"] = "outlier"
    low: AtLeast0 = 1e-4
    high: Above0 = 100.0

    def kept(self, tokens: Tokens, _m2_bound: float) -> Tensor:
        """Keeps rows that have no rho outside [low, high] (`mask.outlier_token_seq`)."""
        rows = RowIndex.of(tokens.rows_T)
        return rows.at_tokens(~rows.any(~self.keeps(tokens.log_rho)))


class Rejection(Frozen):
    """The rejection masks of verl (`rs_*`). For k1, `low` and `high` bound the ratio of engine to trainer.
    For k2 and k3, `upper` is the bound, in nats."""

    whole_step: ClassVar[bool] = False

    name: Literal["rejection"] = "rejection"
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"] = "token"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    low: Above0 | None = None
    high: Above0 | None = None
    upper: AtLeast0 | None = None

    @model_validator(mode="after")
    def _bounds_fit(self) -> "Rejection":
        if self.estimator == "k1":
            if self.level == "seq_max":
                raise ValueError(
                    "rejection: k1 has a sign, so its maximum is no measure of distance; "
                    "seq_max takes k2 or k3"
                )
            if self.low is None or self.high is None or self.upper is not None:
                raise ValueError("rejection: k1 is bounded by low and high")
            if not self.low <= 1 <= self.high:
                raise ValueError(f"rejection: [{self.low:g}, {self.high:g}] leaves out equal policies")
        elif self.upper is None or self.low is not None or self.high is not None:
            raise ValueError(f"rejection: {self.estimator} is bounded by upper alone")
        return self

    @property
    def of_rows(self) -> bool:
        return self.level != "token"

    def kept(self, tokens: Tokens, _m2_bound: float) -> Tensor:
        """Keeps a token if its score is within the bounds: log low <= k1 <= log high, or k2 or k3 <= upper.
        At the `seq_` levels, the sum, mean or maximum of a row's scores decides for the whole row. The scores
        are k1 = -log_rho, k2 = log_rho² / 2 and k3 = rho - 1 - log_rho (verl's rollout rejection;
        `mask.rs_token_k1`, `mask.rs_token_k2`, `mask.rs_token_k3`, `mask.rs_seq_mean_k1`,
        `mask.rs_seq_mean_k3`, `mask.rs_seq_max_k2`)."""
        score_T = self._scores(bounded(tokens.log_rho))
        rows = RowIndex.of(tokens.rows_T)
        measured = {"seq_sum": rows.sum, "seq_mean": rows.mean, "seq_max": rows.largest}
        score = measured[self.level](score_T) if self.of_rows else score_T
        if self.upper is not None:
            kept = score <= self.upper
        else:
            assert self.low is not None and self.high is not None  # noqa: S101, PT018 - `_bounds_fit`
            kept = (score >= log(self.low)) & (score <= log(self.high))
        return rows.at_tokens(kept) if self.of_rows else kept

    def _scores(self, log_rho_T: Tensor) -> Tensor:
        match self.estimator:
            case "k1":
                return -log_rho_T
            case "k2":
                return log_rho_T**2 / 2
            case "k3":
                return log_rho_T.exp() - 1 - log_rho_T


class M2po(Frozen):
    of_rows: ClassVar[bool] = False
    whole_step: ClassVar[bool] = True

    name: Literal["m2po"] = "m2po"
    limit: Above0 = 0.04

    def kept(self, tokens: Tokens, m2_bound: float) -> Tensor:
        """Keeps tokens with log_rho² below the step's bound (`mask.m2po`)."""
        kept_T: Tensor = tokens.log_rho.double() ** 2 < m2_bound
        return kept_T

    def bound(self, log_rho_T: Tensor) -> float:
        """The smallest log_rho² that is masked, in nats². It is chosen so that the mean of all smaller values
        is below `limit`; it is infinite if no token must be masked. `log_rho_T` has the tokens of the whole
        step. If even the smallest value reaches `limit`, all tokens are masked (M2PO, arXiv:2510.01161)."""
        squares_T = (log_rho_T.double() ** 2).sort().values
        means_T = squares_T.cumsum(0) / torch.arange(1, len(squares_T) + 1, device=squares_T.device)
        masked_T = squares_T[means_T >= self.limit]
        return float(masked_T[0]) if len(masked_T) else torch.inf


class Kpop(Frozen):
    of_rows: ClassVar[bool] = False
    whole_step: ClassVar[bool] = False

    name: Literal["kpop"] = "kpop"
    upper: Above0

    def kept(self, tokens: Tokens, _m2_bound: float) -> Tensor:
        """Keeps tokens whose `larger_bernoulli_kl` between trainer and engine is at most `upper` nats
        (`mask.kpop_binary_kl`)."""
        kept_T: Tensor = larger_bernoulli_kl(tokens.lp_prox_T, tokens.lp_roll_T) <= self.upper
        return kept_T


def larger_bernoulli_kl(lp_prox_T: Tensor, lp_roll_T: Tensor) -> Tensor:
    """[T] in nats: the larger one of KL(prox ‖ roll) and KL(roll ‖ prox)."""
    return torch.maximum(bernoulli_kl(lp_prox_T, lp_roll_T), bernoulli_kl(lp_roll_T, lp_prox_T))


class Opsm(Frozen):
    of_rows: ClassVar[bool] = True
    whole_step: ClassVar[bool] = False

    name: Literal["opsm"] = "opsm"
    delta: Above0
    anchor: Anchor = "prox"

    def kept(self, tokens: Tokens, _m2_bound: float) -> Tensor:
        """Keeps all tokens except those with A < 0 in rows whose mean of lp_old - lp_new exceeds `delta` nats
        (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, slime; `loss.ppo_opsm`)."""
        rows = RowIndex.of(tokens.rows_T)
        fallen_T = tokens.anchor(self.anchor) - tokens.lp_new_T.detach()
        far_T = rows.at_tokens(rows.mean(fallen_T) > self.delta)
        return ~(far_T & (tokens.advantages_T < 0))


Mask = Annotated[
    Geometric | Product | Outlier | Rejection | M2po | Kpop | Opsm,
    Field(discriminator="name"),
    BeforeValidator(by_name),
]


def kept_by(masks: Iterable[Mask], tokens: Tokens, m2_bound: float | None = None) -> Tensor:
    """[T] bool: the tokens that all of these masks keep. `m2_bound` is the step's bound for M2PO."""
    m2_bound = torch.inf if m2_bound is None else m2_bound
    kept_T = torch.ones_like(tokens.rows_T, dtype=torch.bool)
    for mask in masks:
        kept_T = kept_T & mask.kept(tokens, m2_bound)
    return kept_T
