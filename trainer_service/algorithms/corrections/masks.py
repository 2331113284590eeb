"""Which tokens a loss leaves out, for what the engine or the policy has made of them. Whole rows, or tokens.

log_rho = lp_prox - lp_roll in nats: what the step begins with over what sampled. True keeps; flags are [T].
Those of rows look at every token of a row, so they do not depend on how rows are packed; M2PO's bound is of
the whole step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import Any, Literal

import torch
from torch import Tensor

from trainer_service.algorithms.corrections import settings as settings
from trainer_service.algorithms.corrections.settings import (
    GEOMETRIC_HIGH,
    GEOMETRIC_LOW,
    M2PO_LIMIT,
    OUTLIER_HIGH,
    OUTLIER_LOW,
    PRODUCT_HIGH,
    PRODUCT_LOW,
    Estimator,
)
from trainer_service.algorithms.ratios import bernoulli_kl, bounded
from trainer_service.algorithms.rows import Rows
from trainer_service.algorithms.tokens import Tokens


def geometric(
    log_rho_T: Tensor, rows_T: Tensor, *, low: float = GEOMETRIC_LOW, high: float = GEOMETRIC_HIGH
) -> Tensor:
    """Rows with low <= exp(mean of log_rho) <= high (`mask.geo_seq`)."""
    rows = Rows.of(rows_T)
    return rows.at_tokens(_between(rows.mean(log_rho_T), low, high))


def product(
    log_rho_T: Tensor, rows_T: Tensor, *, low: float = PRODUCT_LOW, high: float = PRODUCT_HIGH
) -> Tensor:
    """Rows with low <= product of rho <= high (`mask.product_seq`)."""
    rows = Rows.of(rows_T)
    return rows.at_tokens(_between(rows.sum(log_rho_T), low, high))


def outlier(
    log_rho_T: Tensor, rows_T: Tensor, *, low: float = OUTLIER_LOW, high: float = OUTLIER_HIGH
) -> Tensor:
    """Rows without any rho outside [low, high] (`mask.outlier_token_seq`)."""
    rows = Rows.of(rows_T)
    return rows.at_tokens(~rows.any(~_between(log_rho_T, low, high)))


def rejection(
    log_rho_T: Tensor,
    rows_T: Tensor,
    *,
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"],
    estimator: Estimator,
    low: float | None = None,
    high: float | None = None,
    upper: float | None = None,
) -> Tensor:
    """Tokens, or rows by their sum, mean or largest, with log low <= k1 <= log high, or k2 or k3 <= upper:
    k1 = -log_rho, k2 = log_rho² / 2, k3 = rho - 1 - log_rho (verl's rollout rejection; `mask.rs_token_k1`,
    `mask.rs_token_k2`, `mask.rs_token_k3`, `mask.rs_seq_mean_k1`, `mask.rs_seq_mean_k3`,
    `mask.rs_seq_max_k2`)."""
    log_rho_T = bounded(log_rho_T)
    match estimator:
        case "k1":
            score_T = -log_rho_T
        case "k2":
            score_T = log_rho_T**2 / 2
        case "k3":
            score_T = log_rho_T.exp() - 1 - log_rho_T
    rows = Rows.of(rows_T)
    measured = {"seq_sum": rows.sum, "seq_mean": rows.mean, "seq_max": rows.largest}
    score = score_T if level == "token" else measured[level](score_T)
    if estimator == "k1":
        if low is None or high is None:
            raise ValueError("k1 is bounded by low and high")
        kept = (score >= log(low)) & (score <= log(high))
    else:
        if upper is None:
            raise ValueError(f"{estimator} is bounded by upper")
        kept = score <= upper
    return kept if level == "token" else rows.at_tokens(kept)


def m2po_bound(log_rho_T: Tensor, *, limit: float = M2PO_LIMIT) -> float:
    """The smallest log_rho² that must go for the mean of those below it to be less than `limit`; infinite
    where none must. Of the whole step's tokens; where even the smallest is too large, all go
    (arXiv:2510.01161)."""
    squares_T = (log_rho_T.double() ** 2).sort().values
    means_T = squares_T.cumsum(0) / torch.arange(1, len(squares_T) + 1, device=squares_T.device)
    gone_T = squares_T[means_T >= limit]
    return float(gone_T[0]) if len(gone_T) else torch.inf


def m2po(log_rho_T: Tensor, *, bound: float) -> Tensor:
    """Tokens with a square below the step's bound; those that tie go together (`mask.m2po`)."""
    kept_T: Tensor = log_rho_T.double() ** 2 < bound
    return kept_T


def kpop(lp_prox_T: Tensor, lp_roll_T: Tensor, *, upper: float) -> Tensor:
    """Tokens for which both Bernoulli KLs are at most `upper` nats (`mask.kpop_binary_kl`)."""
    kept_T: Tensor = larger_bernoulli_kl(lp_prox_T, lp_roll_T) <= upper
    return kept_T


def larger_bernoulli_kl(lp_prox_T: Tensor, lp_roll_T: Tensor) -> Tensor:
    return torch.maximum(bernoulli_kl(lp_prox_T, lp_roll_T), bernoulli_kl(lp_roll_T, lp_prox_T))


def opsm(lp_new_T: Tensor, lp_old_T: Tensor, advantages_T: Tensor, rows_T: Tensor, *, delta: float) -> Tensor:
    """Tokens but those with A < 0 in a row where the mean of lp_old - lp_new exceeds `delta` nats
    (DeepSeek-V3.2, slime; `loss.ppo_opsm`)."""
    rows = Rows.of(rows_T)
    left_T = rows.at_tokens(rows.mean(lp_old_T - lp_new_T.detach()) > delta)
    return ~(left_T & (advantages_T < 0))


def _between(log_ratio: Tensor, low: float, high: float) -> Tensor:
    ratio = bounded(log_ratio).exp()
    return (ratio >= low) & (ratio <= high)


@dataclass(frozen=True)
class MaskKind:
    """One way to leave tokens out."""

    settings: type[Any]
    kept_T: Callable[[Tokens, Any, float], Tensor]
    """The last is the step's bound for M2PO."""
    of_rows: Callable[[Any], bool] = lambda _: True
    """Whether it keeps or drops rows whole."""


def _rejection(tokens: Tokens, chosen: settings.Rejection, _: float) -> Tensor:
    return rejection(
        tokens.log_rho,
        tokens.rows_T,
        level=chosen.level,
        estimator=chosen.estimator,
        low=chosen.low,
        high=chosen.high,
        upper=chosen.upper,
    )


def _opsm(tokens: Tokens, chosen: settings.Opsm, _: float) -> Tensor:
    lp_old_T = tokens.anchor(chosen.anchor)
    return opsm(tokens.lp_new_T, lp_old_T, tokens.advantages_T, tokens.rows_T, delta=chosen.delta)


MASKS: Mapping[str, MaskKind] = {
    "geometric": MaskKind(
        settings.Geometric, lambda t, s, _: geometric(t.log_rho, t.rows_T, low=s.low, high=s.high)
    ),
    "product": MaskKind(
        settings.Product, lambda t, s, _: product(t.log_rho, t.rows_T, low=s.low, high=s.high)
    ),
    "outlier": MaskKind(
        settings.Outlier, lambda t, s, _: outlier(t.log_rho, t.rows_T, low=s.low, high=s.high)
    ),
    "rejection": MaskKind(settings.Rejection, _rejection, lambda s: s.level != "token"),
    "m2po": MaskKind(settings.M2po, lambda t, _, bound: m2po(t.log_rho, bound=bound), lambda _: False),
    "kpop": MaskKind(
        settings.Kpop, lambda t, s, _: kpop(t.lp_prox_T, t.lp_roll_T, upper=s.upper), lambda _: False
    ),
    "opsm": MaskKind(settings.Opsm, _opsm),
}


def kept_rows(tokens: Tokens, masks: tuple[settings.Mask, ...]) -> Tensor:
    """Which tokens the masks of rows leave in."""
    return _kept(tokens, [mask for mask in masks if MASKS[mask.name].of_rows(mask)], torch.inf)


def kept_tokens(tokens: Tokens, masks: tuple[settings.Mask, ...], m2_bound: float) -> Tensor:
    """Which tokens the masks of tokens leave in."""
    return _kept(tokens, [mask for mask in masks if not MASKS[mask.name].of_rows(mask)], m2_bound)


def _kept(tokens: Tokens, masks: list[settings.Mask], m2_bound: float) -> Tensor:
    kept_T = torch.ones_like(tokens.rows_T, dtype=torch.bool)
    for mask in masks:
        kept_T = kept_T & MASKS[mask.name].kept_T(tokens, mask, m2_bound)
    return kept_T
