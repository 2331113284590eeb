"""Policy gradients without a clip: REINFORCE, importance sampling, DRO.

Names in backticks with a dot, such as `loss.reinforce`, are cases of `algorithms_golden.json` in the tests.
"""

import torch
from torch import Tensor

from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.tokens import ratio


def reinforce(lp_new_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    """-A lp_new (Williams 1992; `loss.reinforce`). GPG (arXiv:2504.02546) is this loss with the advantage
    `gpg`."""
    return TokenLosses.of(-advantages_T * lp_new_T, torch.ones_like(lp_new_T))


def importance_sampling(lp_new_T: Tensor, lp_old_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    """-rA, with the ratio r of lp_new to lp_old (Tinker's `importance_sampling`, with lp_old of the policy
    that sampled and a sum over tokens; `loss.importance_sampling`)."""
    ratio_T = ratio(lp_new_T, lp_old_T)
    return TokenLosses.of(-ratio_T * advantages_T, ratio_T)


def dro(lp_new_T: Tensor, lp_old_T: Tensor, advantages_T: Tensor, *, beta: float) -> TokenLosses:
    """-(A lp_new - beta/2 · d²), with d = lp_new - lp_old in nats (DRO, arXiv:2405.19107, with lp_old of the
    policy that sampled; `loss.dro`)."""
    difference_T = lp_new_T - lp_old_T
    loss_T = -(advantages_T * lp_new_T - beta / 2 * difference_T**2)
    return TokenLosses.of(loss_T, ratio(lp_new_T, lp_old_T))
