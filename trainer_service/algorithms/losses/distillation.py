"""Losses that learn from a teacher or from chosen tokens: on-policy distillation, KDRL, cross-entropy."""

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import (
    KAPPA,
    TEACHER_GAP,
)
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.ratios import ratio


def teacher_advantage(lp_new_T: Tensor, lp_teacher_T: Tensor) -> Tensor:
    """log of teacher over student, in nats, without gradient: its mean is minus the reverse KL
    (`opd.reverse_kl_adv`)."""
    return (lp_teacher_T - lp_new_T).detach()


def reverse_kl(lp_new_T: Tensor, lp_old_T: Tensor, lp_teacher_T: Tensor) -> TokenLosses:
    """-r · log(teacher / student), r to the policy that sampled (spec §6; `opd.reverse_kl_adv`)."""
    ratio_T = ratio(lp_new_T, lp_old_T)
    return TokenLosses.of(-ratio_T * teacher_advantage(lp_new_T, lp_teacher_T), ratio_T)


def ref_kl(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    lp_teacher_T: Tensor,
    *,
    low: float = TEACHER_GAP,
    kappa: float = KAPPA,
) -> TokenLosses:
    """The same where p - q >= -low, p new and q old, and kappa · (lp_new - lp_old)² on every token
    (prime-rl's `ref_kl`; `opd.ref_kl_prime`)."""
    ratio_T = ratio(lp_new_T, lp_old_T)
    kept_T = lp_new_T.detach().exp() - lp_old_T.exp() >= -low
    policy_T = -ratio_T * teacher_advantage(lp_new_T, lp_teacher_T)
    loss_T = torch.where(kept_T, policy_T, torch.zeros_like(policy_T)) + kappa * (lp_new_T - lp_old_T) ** 2
    return TokenLosses.of(loss_T, ratio_T, dropped_T=~kept_T)


def kdrl(
    policy_T: Tensor, lp_new_T: Tensor, lp_teacher_T: Tensor, *, rl_weight: float, teacher_weight: float
) -> Tensor:
    """w_rl · policy loss + w_d · (lp_new - lp_teacher) (arXiv:2506.02208, spec §6)."""
    return rl_weight * policy_T + teacher_weight * (lp_new_T - lp_teacher_T)


def cross_entropy(lp_new_T: Tensor, weights_T: Tensor, *, tokens_in_step: int) -> Tensor:
    """sum of -w · lp_new over chosen tokens / how many the whole step has: a share of its own, beside that of
    the policy loss (spec §6)."""
    return -(weights_T * lp_new_T).sum() / tokens_in_step
