"""CISPO and the loss of GLM-5: both multiply lp_new by a ratio without gradient.

sg() stops the gradient; r is the ratio of lp_new to lp_old.

Names such as `loss.cispo_minimax` are cases of `algorithms_golden.json` in the tests.
"""

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import CISPO_HIGH, CISPO_LOW, GLM5_LIMIT
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.tokens import ratio


def cispo(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    *,
    low: float = CISPO_LOW,
    high: float = CISPO_HIGH,
) -> TokenLosses:
    """-sg(clip(r, low, high)) A lp_new: clipped tokens keep a gradient (CISPO, MiniMax-M1, arXiv:2506.13585;
    `loss.cispo_minimax`, `loss.cispo_tight`, `loss.cispo_rollout_anchor`)."""
    ratio_T = ratio(lp_new_T, lp_old_T).detach()
    loss_T = -ratio_T.clamp(low, high) * advantages_T * lp_new_T
    return TokenLosses.of(loss_T, ratio_T, clipped_high_T=ratio_T > high, clipped_low_T=ratio_T < low)


def glm5(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    *,
    low: float = GLM5_LIMIT,
    high: float = GLM5_LIMIT,
) -> TokenLosses:
    """-sg(f) A lp_new, with f = r within (1 - low, 1 + high) and 0 outside. GLM-5 takes lp_old from the
    policy that sampled (`loss.rollout_is_glm5`)."""
    ratio_T = ratio(lp_new_T, lp_old_T).detach()
    kept_T = (ratio_T > 1 - low) & (ratio_T < 1 + high)
    factor_T = torch.where(kept_T, ratio_T, torch.zeros_like(ratio_T))
    return TokenLosses.of(-factor_T * advantages_T * lp_new_T, ratio_T, dropped_T=~kept_T)
