"""PPO: the clipped surrogate loss, on the ratios of tokens, or on those of rows (GSPO).

Names such as `loss.ppo_clip_sym` are cases of `algorithms_golden.json` in the tests.
"""

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import CLIP_HIGH, CLIP_LOW, DUAL_CLIP, GSPO_HIGH, GSPO_LOW
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.tokens import RowIndex, bounded, ratio


def ppo(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
    dual_clip: float | None = DUAL_CLIP,
) -> TokenLosses:
    """max(-rA, -clip(r, 1 - low, 1 + high) A), and for A < 0 at most -cA, with c = `dual_clip` (PPO,
    arXiv:1707.06347; asymmetric clip of DAPO, arXiv:2503.14476; dual clip, arXiv:1912.09729;
    `loss.ppo_clip_sym`, `loss.ppo_clip_higher`, `loss.ppo_dual_clip`)."""
    return _clipped(ratio(lp_new_T, lp_old_T), advantages_T, clip_low, clip_high, dual_clip)


def gspo(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    rows_T: Tensor,
    *,
    clip_low: float = GSPO_LOW,
    clip_high: float = GSPO_HIGH,
) -> TokenLosses:
    """PPO on s = exp(mean over the row of (lp_new - lp_old)). The gradient of a token's loss is -As, with the
    token's own advantage A (GSPO-token, arXiv:2507.18071; `loss.gspo`, `loss.gspo_wide`)."""
    rows = RowIndex.of(rows_T)
    log_s_T = rows.at_tokens(rows.mean((lp_new_T - lp_old_T).detach()))
    s_T = bounded(log_s_T + lp_new_T - lp_new_T.detach()).exp()
    return _clipped(s_T, advantages_T, clip_low, clip_high, None)


def _clipped(
    ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLosses:
    plain_T = -ratio_T * advantages_T
    bounded_T = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    loss_T = torch.maximum(plain_T, bounded_T)
    dual_T = torch.zeros_like(loss_T, dtype=torch.bool)
    if dual_clip is not None:
        ceiling_T = -dual_clip * advantages_T
        dual_T = (advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, ceiling_T), loss_T)
    return TokenLosses.of(
        loss_T,
        ratio_T,
        clipped_high_T=(bounded_T > plain_T) & (advantages_T > 0),
        clipped_low_T=(bounded_T > plain_T) & (advantages_T < 0),
        dual_T=dual_T,
    )
