"""Losses that drop tokens whose probability has moved too far: DPPO and IPO.

Names such as `loss.dppo_tv_ratio` are cases of `algorithms_golden.json` in the tests.
"""

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import (
    DPPO_LIMIT,
    DPPO_RATIO_CAP,
    IPO_LIMIT,
    KAPPA,
    Divergence,
    Form,
)
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.tokens import bernoulli_kl, ratio


def dppo(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    *,
    divergence: Divergence = "tv",
    form: Form = "ratio",
    low: float = DPPO_LIMIT,
    high: float = DPPO_LIMIT,
    ratio_cap: float = DPPO_RATIO_CAP,
    kappa: float = 0.0,
) -> TokenLosses:
    """-rA (form `ratio`) or -sg(min(r, cap)) A lp_new (form `logp`) for tokens inside the trust region, plus
    kappa · d² on every token, with d = lp_new - lp_old in nats (DPPO, arXiv:2602.04879; `loss.dppo_tv_ratio`,
    `loss.dppo_kl_ratio`, `loss.dppo_tv_logp`, `loss.dppo_kl_logp`, `loss.dppo_tv_plus_kl2`).

    Let p be the new and q the old probability. `tv` keeps a token if p - q <= high for A > 0, and if
    p - q >= -low otherwise. `kl` drops a token that moved in the direction of A if KL(q ‖ p) of the outcomes
    "this token" and "any other token" exceeds `high` for A > 0, and `low` otherwise, in nats."""
    kept_T = _may_move(lp_new_T.detach(), lp_old_T, advantages_T, divergence, low, high)
    ratio_T = ratio(lp_new_T, lp_old_T)
    if form == "ratio":
        policy_T = -ratio_T * advantages_T
    else:
        policy_T = -ratio_T.detach().clamp(max=ratio_cap) * advantages_T * lp_new_T
    return _within(kept_T, policy_T, ratio_T, kappa * (lp_new_T - lp_old_T) ** 2)


def ipo(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    *,
    limit: float = IPO_LIMIT,
    kappa: float = KAPPA,
) -> TokenLosses:
    """-rA for tokens with |p_new - p_old| <= limit, plus kappa · d² on every token, with d = lp_new - lp_old
    in nats (prime-rl's `ipo`; `loss.ipo_symmetric_tv`)."""
    ratio_T = ratio(lp_new_T, lp_old_T)
    kept_T = (lp_new_T.detach().exp() - lp_old_T.exp()).abs() <= limit
    return _within(kept_T, -ratio_T * advantages_T, ratio_T, kappa * (lp_new_T - lp_old_T) ** 2)


def _may_move(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    divergence: Divergence,
    low: float,
    high: float,
) -> Tensor:
    moved_T = lp_new_T.exp() - lp_old_T.exp()
    if divergence == "tv":
        return torch.where(advantages_T > 0, moved_T <= high, moved_T >= -low)
    far_T = bernoulli_kl(lp_old_T, lp_new_T)
    up_T, down_T = lp_new_T > lp_old_T, lp_new_T < lp_old_T
    return ~torch.where(advantages_T > 0, up_T & (far_T > high), down_T & (far_T > low))


def _within(kept_T: Tensor, policy_T: Tensor, ratio_T: Tensor, pull_T: Tensor) -> TokenLosses:
    loss_T = torch.where(kept_T, policy_T, torch.zeros_like(policy_T)) + pull_T
    return TokenLosses.of(loss_T, ratio_T, dropped_T=~kept_T)
