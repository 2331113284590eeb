"""Losses that imitate: a teacher's log-probabilities of the sampled tokens, or the sampled tokens themselves.

Names such as `opd.reverse_kl_adv` are cases of `algorithms_golden.json` in the tests.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer_service.algorithms.kl import KLS
from trainer_service.algorithms.setting_choices import Above0, AtLeast0
from trainer_service.algorithms.tokens import MAX_LOGPROB, Anchor, Tokens, ratio, widened
from trainer_service.algorithms.turn_losses import (
    KAPPA,
    ClippedRatio,
    PolicyLossFormula,
    Share,
    StepStatistics,
    TokenLosses,
    TrustRegion,
)

TopK = Annotated[int, Field(ge=1, le=128)]
"""How many tokens a teacher tells at each place. More would take much memory and time to read."""


def teacher_advantage(lp_new_T: Tensor, lp_teacher_T: Tensor) -> Tensor:
    """[T] in nats, without gradient: lp_teacher - lp_new. Its mean is an estimate of minus the reverse KL
    (`opd.reverse_kl_adv`)."""
    return (lp_teacher_T - lp_new_T).detach()


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


class ReverseKl(PolicyLossFormula):
    """On-policy distillation: the teacher's log-probabilities are the only signal; rewards are not used."""

    uses_advantages: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True

    name: Literal["reverse_kl"] = "reverse_kl"
    anchor: Anchor = "rollout"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-r · (lp_teacher - lp_new), with the ratio r of lp_new to lp_old (on-policy distillation, Thinking
        Machines 2025, with lp_old of the policy that sampled; `opd.reverse_kl_adv`)."""
        ratio_T = ratio(tokens.lp_new_T, tokens.anchor(self.anchor))
        return TokenLosses.of(-ratio_T * teacher_advantage(tokens.lp_new_T, tokens.teacher()), ratio_T)


class RefKl(TrustRegion):
    """On-policy distillation within a trust region."""

    uses_advantages: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True

    name: Literal["ref_kl"] = "ref_kl"
    low: Above0 = 0.2
    kappa: AtLeast0 = KAPPA
    anchor: Anchor = "rollout"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """The loss of `reverse_kl` for tokens with p_new - p_old >= -low, plus kappa · (lp_new - lp_old)² on
        every token (prime-rl's `ref_kl`; `opd.ref_kl_prime`). `low` is a probability."""
        lp_new_T, lp_old_T = tokens.lp_new_T, tokens.anchor(self.anchor)
        ratio_T = ratio(lp_new_T, lp_old_T)
        kept_T = lp_new_T.detach().exp() - lp_old_T.exp() >= -self.low
        policy_T = -ratio_T * teacher_advantage(lp_new_T, tokens.teacher())
        return self.within(kept_T, policy_T, ratio_T, self.kappa * (lp_new_T - lp_old_T) ** 2)


class ForwardKl(PolicyLossFormula):
    """Distillation from the teacher's whole distribution, of which it tells the most probable tokens."""

    uses_advantages: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True

    name: Literal["forward_kl"] = "forward_kl"
    top_k: TopK = 16

    @property
    def teacher_top_k(self) -> int:
        return self.top_k

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """The `top_k_kl` of each token: distillation on what the policy sampled, with the forward KL (GKD,
        arXiv:2306.13649)."""
        distance_T = tokens.teacher_kl()
        return TokenLosses.of(distance_T, torch.ones_like(distance_T))


class Kdrl(ClippedRatio):
    """PPO, plus the distance from a teacher."""

    needs_teacher: ClassVar[bool] = True

    name: Literal["kdrl"] = "kdrl"
    clip_low: Share = 0.2
    clip_high: Above0 = 0.28
    dual_clip: float | None = Field(3.0, gt=1)
    coefficient: Above0
    """The factor of the distance."""
    estimator: Literal["k2", "k3", "top_k"] = "k2"
    """k2, k3: as in `kl`, with the teacher in place of the reference. top_k: the distance of `forward_kl`."""
    top_k: TopK = 16
    """For `top_k`."""
    anchor: Anchor = "prox"

    @property
    def teacher_top_k(self) -> int:
        return self.top_k if self.estimator == "top_k" else 0

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """The loss of PPO plus coefficient · distance, the estimated reverse KL to the teacher (KDRL,
        arXiv:2506.02208). The paper compares estimators. lp_new - lp_teacher, the estimator k1, is no choice
        here: its gradient is 1 for every policy and teacher. k2 has the gradient of the KL for tokens that
        the policy sampled."""
        ratio_T = ratio(tokens.lp_new_T, tokens.anchor(self.anchor))
        found = self.clipped(ratio_T, tokens.advantages_T, self.clip_low, self.clip_high, self.dual_clip)
        if self.estimator == "top_k":
            distance_T = tokens.teacher_kl()
        else:
            distance_T = KLS[self.estimator](tokens.lp_new_T, tokens.teacher(), tokens.lp_prox_T)
        return replace(found, loss_T=found.loss_T + self.coefficient * distance_T)


class CrossEntropy(PolicyLossFormula):
    """Supervised learning of what was sampled. Rewards only choose the sessions."""

    uses_advantages: ClassVar[bool] = False

    name: Literal["cross_entropy"] = "cross_entropy"
    min_reward: float | None = None
    """Sessions with a smaller reward are not trained; None trains all."""

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-lp_new: the gradient of the cross-entropy of the policy with the recorded tokens."""
        return TokenLosses.of(-tokens.lp_new_T, torch.ones_like(tokens.lp_new_T))
