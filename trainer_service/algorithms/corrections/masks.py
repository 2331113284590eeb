"""Chooses the tokens or whole rows that masks leave out of the loss, by ratios of probabilities.

log_rho = lp_prox - lp_roll, in nats. All results are [T] bool; True keeps a token. A mask of rows needs all
tokens of a row. They are always in one micro-batch, so the result does not depend on how rows are packed. The
bound of M2PO is computed over the whole step.

Names in backticks with a dot, such as `mask.geo_seq`, are cases of `algorithms_golden.json` in the tests.
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
from trainer_service.algorithms.tokens import RowIndex, Tokens, bernoulli_kl, bounded


def geometric(
    log_rho_T: Tensor, rows_T: Tensor, *, low: float = GEOMETRIC_LOW, high: float = GEOMETRIC_HIGH
) -> Tensor:
    """Keeps rows with low <= exp(mean of log_rho) <= high (`mask.geo_seq`)."""
    rows = RowIndex.of(rows_T)
    return rows.at_tokens(_between(rows.mean(log_rho_T), low, high))


def product(
    log_rho_T: Tensor, rows_T: Tensor, *, low: float = PRODUCT_LOW, high: float = PRODUCT_HIGH
) -> Tensor:
    """Keeps rows with low <= product of rho <= high (`mask.product_seq`)."""
    rows = RowIndex.of(rows_T)
    return rows.at_tokens(_between(rows.sum(log_rho_T), low, high))


def outlier(
    log_rho_T: Tensor, rows_T: Tensor, *, low: float = OUTLIER_LOW, high: float = OUTLIER_HIGH
) -> Tensor:
    """Keeps rows that have no rho outside [low, high] (`mask.outlier_token_seq`)."""
    rows = RowIndex.of(rows_T)
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
    """Keeps a token if its score is within the bounds: log low <= k1 <= log high, or k2 or k3 <= upper. At
    the `seq_` levels, the sum, mean or maximum of a row's scores decides for the whole row. The scores are
    k1 = -log_rho, k2 = log_rho² / 2 and k3 = rho - 1 - log_rho (verl's rollout rejection; `mask.rs_token_k1`,
    `mask.rs_token_k2`, `mask.rs_token_k3`, `mask.rs_seq_mean_k1`, `mask.rs_seq_mean_k3`,
    `mask.rs_seq_max_k2`). Raises ValueError for a missing bound."""
    log_rho_T = bounded(log_rho_T)
    match estimator:
        case "k1":
            score_T = -log_rho_T
        case "k2":
            score_T = log_rho_T**2 / 2
        case "k3":
            score_T = log_rho_T.exp() - 1 - log_rho_T
    rows = RowIndex.of(rows_T)
    measured = {"seq_sum": rows.sum, "seq_mean": rows.mean, "seq_max": rows.largest}
    score = score_T if level == "token" else measured[level](score_T)
    if estimator == "k1":
        if low is None or high is None:
            raise ValueError("k1 needs the bounds low and high")
        kept = (score >= log(low)) & (score <= log(high))
    else:
        if upper is None:
            raise ValueError(f"{estimator} needs the bound upper")
        kept = score <= upper
    return kept if level == "token" else rows.at_tokens(kept)


def m2po_bound(log_rho_T: Tensor, *, limit: float = M2PO_LIMIT) -> float:
    """The smallest log_rho² that is masked, in nats². It is chosen so that the mean of all smaller values is
    below `limit`; it is infinite if no token must be masked. `log_rho_T` has the tokens of the whole step. If
    even the smallest value reaches `limit`, all tokens are masked (M2PO, arXiv:2510.01161)."""
    squares_T = (log_rho_T.double() ** 2).sort().values
    means_T = squares_T.cumsum(0) / torch.arange(1, len(squares_T) + 1, device=squares_T.device)
    masked_T = squares_T[means_T >= limit]
    return float(masked_T[0]) if len(masked_T) else torch.inf


def m2po(log_rho_T: Tensor, *, bound: float) -> Tensor:
    """Keeps tokens with log_rho² below the step's bound of `m2po_bound` (`mask.m2po`)."""
    kept_T: Tensor = log_rho_T.double() ** 2 < bound
    return kept_T


def kpop(lp_prox_T: Tensor, lp_roll_T: Tensor, *, upper: float) -> Tensor:
    """Keeps tokens whose `larger_bernoulli_kl` is at most `upper` nats (`mask.kpop_binary_kl`)."""
    kept_T: Tensor = larger_bernoulli_kl(lp_prox_T, lp_roll_T) <= upper
    return kept_T


def larger_bernoulli_kl(lp_prox_T: Tensor, lp_roll_T: Tensor) -> Tensor:
    """[T] in nats: the larger one of KL(prox ‖ roll) and KL(roll ‖ prox)."""
    return torch.maximum(bernoulli_kl(lp_prox_T, lp_roll_T), bernoulli_kl(lp_roll_T, lp_prox_T))


def opsm(lp_new_T: Tensor, lp_old_T: Tensor, advantages_T: Tensor, rows_T: Tensor, *, delta: float) -> Tensor:
    """Keeps all tokens except those with A < 0 in rows whose mean of lp_old - lp_new exceeds `delta` nats
    (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, slime; `loss.ppo_opsm`)."""
    rows = RowIndex.of(rows_T)
    far_T = rows.at_tokens(rows.mean(lp_old_T - lp_new_T.detach()) > delta)
    return ~(far_T & (advantages_T < 0))


def _between(log_ratio: Tensor, low: float, high: float) -> Tensor:
    ratio = bounded(log_ratio).exp()
    return (ratio >= low) & (ratio <= high)


@dataclass(frozen=True)
class MaskKind:
    """One mask."""

    settings: type[Any]
    kept_T: Callable[[Tokens, Any, float], Tensor]
    """Takes the tokens, the mask's settings and the step's bound for M2PO; returns [T] bool."""
    of_rows: Callable[[Any], bool] = lambda _: True
    """Whether the mask keeps or drops whole rows."""


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
    """[T] bool: the tokens that all masks of rows keep."""
    return _kept(tokens, [mask for mask in masks if MASKS[mask.name].of_rows(mask)], torch.inf)


def kept_tokens(tokens: Tokens, masks: tuple[settings.Mask, ...], m2_bound: float) -> Tensor:
    """[T] bool: the tokens that all masks of tokens keep. `m2_bound` is the step's bound for M2PO."""
    return _kept(tokens, [mask for mask in masks if not MASKS[mask.name].of_rows(mask)], m2_bound)


def _kept(tokens: Tokens, masks: list[settings.Mask], m2_bound: float) -> Tensor:
    kept_T = torch.ones_like(tokens.rows_T, dtype=torch.bool)
    for mask in masks:
        kept_T = kept_T & MASKS[mask.name].kept_T(tokens, mask, m2_bound)
    return kept_T
