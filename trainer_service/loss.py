"""The policy loss, token by token: PPO with asymmetric and dual clip, weighted for what the engine sampled.

    lp_new ─ lp_prox ─▶ r ─▶ clipped loss ───┐
    lp_prox ─ lp_roll ─▶ rho ─▶ weight w ────┴▶ sum of w · loss, over the tokens of the whole step

All arithmetic is float32 or better; shapes are flat [T], the trained tokens of one micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_service.settings import AlgorithmSettings

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class TokenLosses:
    """What `policy_loss` made of each token."""

    loss: Tensor
    """The scalar to differentiate: this micro-batch's share of the step's loss."""
    per_token_T: Tensor
    ratio_T: Tensor
    weight_T: Tensor
    """w: 0 where a row or a token was left out."""
    clipped_high_T: Tensor
    clipped_low_T: Tensor
    dual_T: Tensor
    kept_T: Tensor
    """False where the weight was set to 0."""


def selected_logprobs(logits_TV: Tensor, targets_T: Tensor, temperatures_T: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each target and the entropy (no gradient) at its temperature (`logits.logp_entropy_T*`)."""
    scaled_TV = logits_TV.float() / temperatures_T[:, None]
    normaliser_T = torch.logsumexp(scaled_TV, dim=-1)
    logprobs_T = scaled_TV.gather(-1, targets_T[:, None]).squeeze(-1) - normaliser_T
    with torch.no_grad():
        p_TV = (scaled_TV - normaliser_T[:, None]).exp()
        entropy_T = normaliser_T - (p_TV * scaled_TV).sum(-1)
    return logprobs_T, entropy_T


def policy_loss(
    lp_new_T: Tensor,
    lp_prox_T: Tensor,
    lp_roll_T: Tensor,
    advantages_T: Tensor,
    rows_T: Tensor,
    tokens_in_step: int,
    algorithm: AlgorithmSettings,
) -> TokenLosses:
    """`loss.ppo_clip_higher`, `loss.ppo_dual_clip` and `loss.ppo_tis_token2`, aggregated by `agg.token_mean`.

    `tokens_in_step` counts every trained token of the optimizer step, masked by a weight of 0 or not: a
    denominator of survivors would grow the others' gradient. `rows_T` says which tokens share a row.
    """
    lp_prox_T = lp_prox_T.detach()
    ratio_T = _ratio(lp_new_T, lp_prox_T)
    clipped_T = ratio_T.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    plain_T, bounded_T = -ratio_T * advantages_T, -clipped_T * advantages_T
    loss_T = torch.maximum(plain_T, bounded_T)
    clipped_high_T = (bounded_T > plain_T) & (advantages_T > 0)
    clipped_low_T = (bounded_T > plain_T) & (advantages_T < 0)
    dual_T = torch.zeros_like(clipped_low_T)
    if algorithm.dual_clip is not None:
        ceiling_T = -algorithm.dual_clip * advantages_T
        dual_T = (advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, ceiling_T), loss_T)
    weight_T, kept_T = rollout_weights(lp_prox_T, lp_roll_T, rows_T, algorithm)
    # A dropped token may hold a non-finite loss, and 0 · inf is not 0.
    weighted_T = torch.where(kept_T, weight_T * loss_T, torch.zeros_like(loss_T))
    return TokenLosses(
        loss=weighted_T.sum() / tokens_in_step,
        per_token_T=weighted_T.detach(),
        ratio_T=ratio_T.detach(),
        weight_T=weight_T,
        clipped_high_T=clipped_high_T,
        clipped_low_T=clipped_low_T,
        dual_T=dual_T,
        kept_T=kept_T,
    )


@torch.no_grad()
def rollout_weights(
    lp_prox_T: Tensor, lp_roll_T: Tensor, rows_T: Tensor, algorithm: AlgorithmSettings
) -> tuple[Tensor, Tensor]:
    """min(rho, C), and which tokens are kept at all (`is.tis_token_2`, `mask.outlier_token_seq`).

    Order matters: non-finite log ratios first, then whole rows with an outlier, then the cap.
    """
    finite_T = torch.isfinite(lp_prox_T - lp_roll_T)
    rho_T = torch.where(finite_T, _ratio(lp_prox_T, lp_roll_T), torch.zeros_like(lp_prox_T))
    outlier_T = finite_T & ((rho_T < algorithm.outlier_low) | (rho_T > algorithm.outlier_high))
    kept_T = finite_T & ~torch.isin(rows_T, rows_T[outlier_T])
    weight_T = torch.ones_like(rho_T) if algorithm.tis_cap is None else rho_T.clamp(max=algorithm.tis_cap)
    return torch.where(kept_T, weight_T, torch.zeros_like(weight_T)), kept_T


def _ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    return (numerator_T - denominator_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
