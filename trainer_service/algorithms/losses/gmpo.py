"""GMPO: the geometric mean of a row's clipped ratios, one loss for all tokens of the row.

`loss.gmpo` is a case of `algorithms_golden.json` in the tests.
"""

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import GMPO_CLIP
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.tokens import RowIndex, bounded


def gmpo(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    rows_T: Tensor,
    *,
    clip_low: float = GMPO_CLIP,
    clip_high: float = GMPO_CLIP,
) -> TokenLosses:
    """-A exp(mean over the row of sgn · min(sgn · d, sgn · clip(d, -low, high))), with d = lp_new - lp_old in
    nats, sgn the sign of the token's advantage, and A the mean advantage of the row (GMPO, arXiv:2507.20673;
    `loss.gmpo`).

    Every token has the loss of its row. With `seq_mean_token_mean` this gives the mean over rows, as
    published."""
    rows = RowIndex.of(rows_T)
    difference_T = bounded(lp_new_T - lp_old_T)
    sign_T = advantages_T.sign()
    clipped_T = difference_T.clamp(-clip_low, clip_high)
    lower_T = torch.minimum(sign_T * difference_T, sign_T * clipped_T)
    ratio_R = rows.mean(sign_T * lower_T).exp()
    loss_R = -rows.mean(advantages_T) * ratio_R
    outside_T = sign_T * clipped_T < sign_T * difference_T
    return TokenLosses.of(
        rows.at_tokens(loss_R),
        rows.at_tokens(ratio_R),
        clipped_high_T=outside_T & (advantages_T > 0),
        clipped_low_T=outside_T & (advantages_T < 0),
    )
