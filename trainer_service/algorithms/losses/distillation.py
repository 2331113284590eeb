"""Losses that imitate: a teacher's log-probabilities of the sampled tokens, or the sampled tokens themselves.

Names such as `opd.reverse_kl_adv` are cases of `algorithms_golden.json` in the tests.
"""

from dataclasses import replace

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import KAPPA, TEACHER_GAP
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.tokens import MAX_LOGPROB, ratio, widened


def teacher_advantage(lp_new_T: Tensor, lp_teacher_T: Tensor) -> Tensor:
    """[T] in nats, without gradient: lp_teacher - lp_new. Its mean is an estimate of minus the reverse KL
    (`opd.reverse_kl_adv`)."""
    return (lp_teacher_T - lp_new_T).detach()


def reverse_kl(lp_new_T: Tensor, lp_old_T: Tensor, lp_teacher_T: Tensor) -> TokenLosses:
    """-r · (lp_teacher - lp_new), with the ratio r of lp_new to lp_old (on-policy distillation, Thinking
    Machines 2025, with lp_old of the policy that sampled; `opd.reverse_kl_adv`)."""
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
    """The loss of `reverse_kl` for tokens with p_new - p_old >= -low, plus kappa · (lp_new - lp_old)² on
    every token (prime-rl's `ref_kl`; `opd.ref_kl_prime`). `low` is a probability."""
    ratio_T = ratio(lp_new_T, lp_old_T)
    kept_T = lp_new_T.detach().exp() - lp_old_T.exp() >= -low
    policy_T = -ratio_T * teacher_advantage(lp_new_T, lp_teacher_T)
    loss_T = torch.where(kept_T, policy_T, torch.zeros_like(policy_T)) + kappa * (lp_new_T - lp_old_T) ** 2
    return TokenLosses.of(loss_T, ratio_T, dropped_T=~kept_T)


def top_k_kl(lp_top_TK: Tensor, lp_teacher_TK: Tensor) -> Tensor:
    """[T] in nats: KL(teacher ‖ policy) of the K + 1 outcomes "this token", for each of the teacher's K most
    probable tokens, and "any other token" (the Top-K divergence of DPPO, arXiv:2602.04879, which has one
    other outcome with the remaining mass). It is at most the KL over all tokens, and 0 only if the policy
    agrees about the K tokens. A sum over these tokens alone would reward mass on them without end: top-K
    distillation without the rest is biased (arXiv:2503.16870). Only `lp_top_TK` has a gradient."""
    lp_teacher_TK = widened(lp_teacher_TK).detach()
    among_T = (lp_teacher_TK.exp() * (lp_teacher_TK - lp_top_TK)).sum(-1)
    rest_T, teacher_rest_T = _lp_of_the_rest(lp_top_TK), _lp_of_the_rest(lp_teacher_TK)
    return among_T + teacher_rest_T.exp() * (teacher_rest_T - rest_T)


def _lp_of_the_rest(lp_TK: Tensor) -> Tensor:
    """[T]: log(1 - the sum of the probabilities). A sum above 1 - 1e-7 counts as that."""
    return (-torch.expm1(lp_TK.logsumexp(-1).clamp(max=MAX_LOGPROB))).log()


def forward_kl(distance_T: Tensor) -> TokenLosses:
    """The `top_k_kl` of each token: distillation on what the policy sampled, with the forward KL (GKD,
    arXiv:2306.13649)."""
    return TokenLosses.of(distance_T, torch.ones_like(distance_T))


def kdrl(reinforced: TokenLosses, distance_T: Tensor, *, coefficient: float) -> TokenLosses:
    """The loss of `reinforced` plus coefficient · distance, the estimated reverse KL to the teacher (KDRL,
    arXiv:2506.02208). The paper compares estimators. lp_new - lp_teacher, the estimator k1, is no choice
    here: its gradient is 1 for every policy and teacher. k2 has the gradient of the KL for tokens that the
    policy sampled."""
    return replace(reinforced, loss_T=reinforced.loss_T + coefficient * distance_T)


def cross_entropy(lp_new_T: Tensor) -> TokenLosses:
    """-lp_new: the gradient of the cross-entropy of the policy with the recorded tokens."""
    return TokenLosses.of(-lp_new_T, torch.ones_like(lp_new_T))
