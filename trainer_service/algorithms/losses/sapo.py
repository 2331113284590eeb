"""SAPO: a sigmoid gate on the ratio in place of a clip.

`loss.sapo` is a case of `algorithms_golden.json` in the tests.
"""

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import SAPO_NEGATIVE, SAPO_POSITIVE
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.tokens import ratio


def sapo(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    *,
    tau_positive: float = SAPO_POSITIVE,
    tau_negative: float = SAPO_NEGATIVE,
) -> TokenLosses:
    """-(4/tau) sigmoid(tau (r - 1)) A, with tau = `tau_positive` for A > 0 and `tau_negative` otherwise
    (SAPO, arXiv:2511.20347; `loss.sapo`)."""
    ratio_T = ratio(lp_new_T, lp_old_T)
    positive_T, negative_T = torch.full_like(ratio_T, tau_positive), torch.full_like(ratio_T, tau_negative)
    tau_T = torch.where(advantages_T > 0, positive_T, negative_T)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1))
    return TokenLosses.of(-gate_T * advantages_T, ratio_T)
