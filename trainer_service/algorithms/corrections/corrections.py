"""Computes importance weights for tokens to which trainer and engine give different probabilities.

rho = exp(log_rho) with log_rho = lp_prox - lp_roll, in nats: a token's log-probability before the step, minus
that with which the engine sampled it. A weight multiplies the loss of its token.

Names in backticks with a dot, such as `is.tis_token_2`, are cases of `algorithms_golden.json` in the tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer_service.algorithms.corrections import settings as settings
from trainer_service.algorithms.corrections.settings import (
    ICEPOP_HIGH,
    ICEPOP_LOW,
    TIS_SEQUENCE_CAP,
    TIS_TOKEN_CAP,
)
from trainer_service.algorithms.tokens import RowIndex, Tokens, bounded


@dataclass(frozen=True)
class TokenWeights:
    """The weights of T tokens."""

    weight_T: Tensor
    kept_T: Tensor
    """bool: False for a token that the correction left out, with weight 0."""
    capped_T: Tensor
    """bool: True for a ratio that reached the cap."""


def uncorrected(log_rho_T: Tensor) -> TokenWeights:
    """Gives every token the weight 1."""
    kept_T = torch.ones_like(log_rho_T, dtype=torch.bool)
    return TokenWeights(torch.ones_like(log_rho_T), kept_T, ~kept_T)


def tis_token(log_rho_T: Tensor, *, cap: float = TIS_TOKEN_CAP) -> TokenWeights:
    """min(rho, cap): truncated importance sampling (Ionides 2008), and decoupled PPO in mode `clamp`
    (`is.tis_token_2`, `loss.decoupled_ppo_clamp5`)."""
    return _capped(bounded(log_rho_T).exp(), cap)


def tis_sequence(log_rho_T: Tensor, rows_T: Tensor, *, cap: float = TIS_SEQUENCE_CAP) -> TokenWeights:
    """min(product of the rho of the row, cap), for each token of the row (`is.tis_seq_5`)."""
    rows = RowIndex.of(rows_T)
    return _capped(rows.at_tokens(bounded(rows.sum(log_rho_T)).exp()), cap)


def icepop(log_rho_T: Tensor, *, low: float = ICEPOP_LOW, high: float = ICEPOP_HIGH) -> TokenWeights:
    """rho within [low, high], and 0 outside (IcePop; `is.icepop_0.5_5`). With bounds of 0 and 5 it is
    decoupled PPO in mode `mask` (`loss.decoupled_ppo_mask5`)."""
    rho_T = bounded(log_rho_T).exp()
    kept_T = (rho_T >= low) & (rho_T <= high)
    return TokenWeights(torch.where(kept_T, rho_T, torch.zeros_like(rho_T)), kept_T, torch.zeros_like(kept_T))


def normalised(weights: TokenWeights, mean: float) -> TokenWeights:
    """The weights, divided by the step's mean weight (`is.tis_token_2_batchnorm`)."""
    return replace(weights, weight_T=weights.weight_T / mean)


def mean_weight(weights: TokenWeights, kept_T: Tensor, rows_T: Tensor | None = None) -> float:
    """The mean weight of the kept tokens of the whole step. If the tokens of a row share one weight, pass
    `rows_T`: then the mean is over rows. The result is 1 if no token is kept or all weights are 0."""
    weight_T = weights.weight_T[kept_T].double()
    if rows_T is not None:
        weight_T = RowIndex.of(rows_T[kept_T]).mean(weight_T)
    mean = float(weight_T.mean()) if len(weight_T) else 0.0
    return mean if mean > 0 else 1.0


def _capped(rho_T: Tensor, cap: float) -> TokenWeights:
    return TokenWeights(rho_T.clamp(max=cap), torch.ones_like(rho_T, dtype=torch.bool), rho_T >= cap)


@dataclass(frozen=True)
class CorrectionKind:
    """One correction."""

    settings: type[Any]
    weigh: Callable[[Tokens, Any], TokenWeights]
    by_row: bool = False
    """Whether all tokens of a row have the same weight."""


CORRECTIONS: Mapping[str, CorrectionKind] = {
    "none": CorrectionKind(settings.NoCorrection, lambda t, _: uncorrected(t.log_rho)),
    "tis_token": CorrectionKind(settings.TisToken, lambda t, s: tis_token(t.log_rho, cap=s.cap)),
    "tis_sequence": CorrectionKind(
        settings.TisSequence, lambda t, s: tis_sequence(t.log_rho, t.rows_T, cap=s.cap), by_row=True
    ),
    "icepop": CorrectionKind(settings.Icepop, lambda t, s: icepop(t.log_rho, low=s.low, high=s.high)),
}
