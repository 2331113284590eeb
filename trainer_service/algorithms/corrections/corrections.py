"""Weights for tokens that the engine sampled from another policy than the step begins with. No gradient.

log_rho = lp_prox - lp_roll in nats. A weight multiplies the loss of its token.
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
from trainer_service.algorithms.ratios import bounded
from trainer_service.algorithms.rows import Rows
from trainer_service.algorithms.tokens import Tokens


@dataclass(frozen=True)
class Weights:
    """What T tokens count."""

    weight_T: Tensor
    kept_T: Tensor
    """False where the weight was set to 0."""
    capped_T: Tensor
    """True where the ratio was larger than its weight may be."""


def uncorrected(log_rho_T: Tensor) -> Weights:
    """1 for every token."""
    kept_T = torch.ones_like(log_rho_T, dtype=torch.bool)
    return Weights(torch.ones_like(log_rho_T), kept_T, ~kept_T)


def tis_token(log_rho_T: Tensor, *, cap: float = TIS_TOKEN_CAP) -> Weights:
    """min(rho, cap): truncated importance sampling, and decoupled PPO of the mode `clamp` (`is.tis_token_2`,
    `loss.decoupled_ppo_clamp5`)."""
    return _capped(bounded(log_rho_T).exp(), cap)


def tis_sequence(log_rho_T: Tensor, rows_T: Tensor, *, cap: float = TIS_SEQUENCE_CAP) -> Weights:
    """min(product of the row's rho, cap), for each of its tokens (`is.tis_seq_5`)."""
    rows = Rows.of(rows_T)
    return _capped(rows.at_tokens(bounded(rows.sum(log_rho_T)).exp()), cap)


def icepop(log_rho_T: Tensor, *, low: float = ICEPOP_LOW, high: float = ICEPOP_HIGH) -> Weights:
    """rho within [low, high] and 0 elsewhere; with 0 and 5, decoupled PPO of the mode `mask`
    (`is.icepop_0.5_5`, `loss.decoupled_ppo_mask5`)."""
    rho_T = bounded(log_rho_T).exp()
    kept_T = (rho_T >= low) & (rho_T <= high)
    return Weights(torch.where(kept_T, rho_T, torch.zeros_like(rho_T)), kept_T, torch.zeros_like(kept_T))


def normalised(weights: Weights, mean: float) -> Weights:
    """Divided by the step's mean (`is.tis_token_2_batchnorm`)."""
    return replace(weights, weight_T=weights.weight_T / mean)


def mean_weight(weights: Weights, surviving_T: Tensor, rows_T: Tensor | None = None) -> float:
    """The mean over the whole step's survivors: tokens, or rows where `rows_T` is given, for weights that the
    tokens of a row share. 1 where none survives, or none counts."""
    weight_T = weights.weight_T[surviving_T].double()
    if rows_T is not None:
        weight_T = Rows.of(rows_T[surviving_T]).mean(weight_T)
    mean = float(weight_T.mean()) if len(weight_T) else 0.0
    return mean if mean > 0 else 1.0


def _capped(rho_T: Tensor, cap: float) -> Weights:
    return Weights(rho_T.clamp(max=cap), torch.ones_like(rho_T, dtype=torch.bool), rho_T >= cap)


@dataclass(frozen=True)
class CorrectionKind:
    """One way to weigh tokens."""

    settings: type[Any]
    weigh: Callable[[Tokens, Any], Weights]
    by_row: bool = False
    """Whether the tokens of a row have one weight."""


CORRECTIONS: Mapping[str, CorrectionKind] = {
    "none": CorrectionKind(settings.NoCorrection, lambda t, _: uncorrected(t.log_rho)),
    "tis_token": CorrectionKind(settings.TisToken, lambda t, s: tis_token(t.log_rho, cap=s.cap)),
    "tis_sequence": CorrectionKind(
        settings.TisSequence, lambda t, s: tis_sequence(t.log_rho, t.rows_T, cap=s.cap), by_row=True
    ),
    "icepop": CorrectionKind(settings.Icepop, lambda t, s: icepop(t.log_rho, low=s.low, high=s.high)),
}
