"""The policy losses: each is a class with its settings, and takes tokens and gives a loss for every token.

    Tokens, StepStatistics ─ Ppo(clip_low=…).losses ─▶ TokenLosses

r is the ratio of lp_new to lp_old, A the advantage; lp_old is of the policy that `anchor` names. sg() stops
the gradient. The losses that imitate are in `imitation.py`.

Names in backticks with a dot, such as `loss.ppo_clip_sym`, are cases of `algorithms_golden.json` in the
tests.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer_service.algorithms.setting_choices import Above0, AtLeast0, Frozen, Within
from trainer_service.algorithms.tokens import Anchor, RowIndex, Tokens, bernoulli_kl, bounded, ratio

KAPPA = 1e-3
"""The coefficient of the squared log-ratio that trust-region losses add for every token."""

Share = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class TokenLosses:
    """T losses, before any weight, and whether the token was clipped. Only `loss_T` has a gradient."""

    loss_T: Tensor
    ratio_T: Tensor
    """The ratio to the anchor policy: of the token, or of its row for losses on whole rows."""
    clipped_high_T: Tensor
    """bool: clipped from above, for a positive advantage."""
    clipped_low_T: Tensor
    """bool: clipped from below, for a negative advantage."""
    dual_T: Tensor
    """bool: at the ceiling of the dual clip."""
    dropped_T: Tensor
    """bool: outside the loss's own trust region, so that the advantage gives no gradient."""

    @classmethod
    def of(
        cls,
        loss_T: Tensor,
        ratio_T: Tensor,
        *,
        clipped_high_T: Tensor | None = None,
        clipped_low_T: Tensor | None = None,
        dual_T: Tensor | None = None,
        dropped_T: Tensor | None = None,
    ) -> "TokenLosses":
        none_T = torch.zeros_like(loss_T, dtype=torch.bool)
        return cls(
            loss_T=loss_T,
            ratio_T=ratio_T.detach(),
            clipped_high_T=none_T if clipped_high_T is None else clipped_high_T,
            clipped_low_T=none_T if clipped_low_T is None else clipped_low_T,
            dual_T=none_T if dual_T is None else dual_T,
            dropped_T=none_T if dropped_T is None else dropped_T,
        )


@dataclass(frozen=True)
class CovarianceCut:
    """KL-Cov chooses the tokens to penalise: those with the largest part in the step's covariance of A and
    lp."""

    advantage: float
    """The mean advantage of the step's tokens."""
    logprob: float
    """The mean log-probability of the step's tokens, in nats."""
    bound: float
    """The smallest (A - mean A)(lp - mean lp) of a penalised token."""

    @classmethod
    def of(cls, lp_T: Tensor, advantages_T: Tensor, *, fraction: float) -> "CovarianceCut":
        """Chooses the `fraction` of tokens with the largest (A - mean A)(lp - mean lp), one at least."""
        if len(lp_T) == 0:
            return cls(0.0, 0.0, torch.inf)
        lp_T, advantages_T = lp_T.double(), advantages_T.double()
        centred = cls(float(advantages_T.mean()), float(lp_T.mean()), -torch.inf)
        chosen = max(1, int(len(lp_T) * fraction))
        bound = centred.covariance(lp_T, advantages_T).topk(chosen).values[-1]
        return cls(centred.advantage, centred.logprob, float(bound))

    def covariance(self, lp_T: Tensor, advantages_T: Tensor) -> Tensor:
        """[T] float64: (A - mean A)(lp - mean lp)."""
        return (advantages_T.double() - self.advantage) * (lp_T.double() - self.logprob)

    def chosen(self, lp_T: Tensor, advantages_T: Tensor) -> Tensor:
        """[T] bool: the tokens to penalise. Tokens that tie at the bound are all chosen."""
        chosen_T: Tensor = self.covariance(lp_T, advantages_T) >= self.bound
        return chosen_T


@dataclass(frozen=True)
class StepStatistics:
    """Statistics over the tokens of all ranks and micro-batches, which every micro-batch uses. They are
    computed before the step's first backward pass."""

    m2_bound: float | None = None
    """M2PO: the smallest squared log-ratio that is masked, in nats²."""
    mean_weight: float | None = None
    """The divisor of normalised correction weights."""
    covariance: CovarianceCut | None = None
    """KL-Cov: chooses the tokens that get the KL penalty."""


def weighted_logprob(weight: Tensor, advantages: Tensor, lp_new: Tensor) -> Tensor:
    """-sg(weight) A lp_new."""
    return -weight.detach() * advantages * lp_new


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-rA and -clip(r, low, high) A: the larger one is the loss."""
    return -ratio * advantages, -ratio.clamp(low, high) * advantages


def optimistic(lp_new: Tensor, lp_old: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """-(A lp_new - beta/2 · d²), with d = lp_new - lp_old in nats (DRO, arXiv:2405.19107)."""
    return -(advantages * lp_new - beta / 2 * (lp_new - lp_old) ** 2)


class PolicyLossFormula(Frozen):
    """What the losses have in common."""

    uses_advantages: ClassVar[bool] = True
    """Whether the loss of a token depends on its advantage."""
    needs_teacher: ClassVar[bool] = False
    whole_step: ClassVar[bool] = False
    """Whether the loss needs the `StepStatistics` of the whole step."""

    @property
    def teacher_top_k(self) -> int:
        """How many of its most probable tokens the teacher must tell at each place."""
        return 0

    def anchored_to(self, anchor: Anchor) -> bool:
        """Whether this policy is in the denominator of the loss's ratio."""
        return getattr(self, "anchor", None) == anchor

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        raise NotImplementedError


class ClippedRatio(PolicyLossFormula):
    """PPO: the clipped surrogate loss, on the ratios of tokens, or on those of rows."""

    def clipped(
        self, ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, dual_clip: float | None = None
    ) -> TokenLosses:
        """max(-rA, -clip(r, 1 - low, 1 + high) A), and for A < 0 at most -cA, with c = `dual_clip`."""
        plain_T, bounded_T = clipped_surrogate(ratio_T, advantages_T, 1 - low, 1 + high)
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


class Ppo(ClippedRatio):
    name: Literal["ppo"] = "ppo"
    clip_low: Share = 0.2
    clip_high: Above0 = 0.28
    dual_clip: float | None = Field(3.0, gt=1)
    """The loss of a token with a negative advantage is at most this times |advantage|; null: no bound."""
    anchor: Anchor = "prox"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """PPO, arXiv:1707.06347; asymmetric clip of DAPO, arXiv:2503.14476; dual clip, arXiv:1912.09729
        (`loss.ppo_clip_sym`, `loss.ppo_clip_higher`, `loss.ppo_dual_clip`)."""
        ratio_T = ratio(tokens.lp_new_T, tokens.anchor(self.anchor))
        return self.clipped(ratio_T, tokens.advantages_T, self.clip_low, self.clip_high, self.dual_clip)


class Gspo(ClippedRatio):
    name: Literal["gspo"] = "gspo"
    clip_low: Share = 3e-4
    clip_high: Above0 = 4e-4
    anchor: Anchor = "prox"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """PPO on s = exp(mean over the row of (lp_new - lp_old)). The gradient of a token's loss is -As, with
        the token's own advantage A (GSPO-token, arXiv:2507.18071; `loss.gspo`, `loss.gspo_wide`)."""
        rows, lp_new_T = RowIndex.of(tokens.rows_T), tokens.lp_new_T
        log_s_T = rows.at_tokens(rows.mean((lp_new_T - tokens.anchor(self.anchor)).detach()))
        s_T = bounded(log_s_T + lp_new_T - lp_new_T.detach()).exp()
        return self.clipped(s_T, tokens.advantages_T, self.clip_low, self.clip_high)


class Gmpo(PolicyLossFormula):
    name: Literal["gmpo"] = "gmpo"
    clip_low: Above0 = 0.2
    """In nats: log-ratios are clipped."""
    clip_high: Above0 = 0.2
    anchor: Anchor = "prox"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-A exp(mean over the row of sgn · min(sgn · d, sgn · clip(d, -low, high))), with d = lp_new -
        lp_old in nats, sgn the sign of the token's advantage, and A the mean advantage of the row (GMPO,
        arXiv:2507.20673; `loss.gmpo`).

        Every token has the loss of its row. With `seq_mean_token_mean` this gives the mean over rows, as
        published."""
        rows, advantages_T = RowIndex.of(tokens.rows_T), tokens.advantages_T
        difference_T = bounded(tokens.lp_new_T - tokens.anchor(self.anchor))
        sign_T = advantages_T.sign()
        clipped_T = difference_T.clamp(-self.clip_low, self.clip_high)
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


class Cispo(Within, PolicyLossFormula):
    name: Literal["cispo"] = "cispo"
    low: AtLeast0 = 0.0
    high: Above0 = 5.0
    anchor: Anchor = "prox"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-sg(clip(r, low, high)) A lp_new: clipped tokens keep a gradient (CISPO, MiniMax-M1,
        arXiv:2506.13585; `loss.cispo_minimax`, `loss.cispo_tight`, `loss.cispo_rollout_anchor`)."""
        ratio_T = ratio(tokens.lp_new_T, tokens.anchor(self.anchor)).detach()
        loss_T = weighted_logprob(ratio_T.clamp(self.low, self.high), tokens.advantages_T, tokens.lp_new_T)
        high_T, low_T = ratio_T > self.high, ratio_T < self.low
        return TokenLosses.of(loss_T, ratio_T, clipped_high_T=high_T, clipped_low_T=low_T)


class Reinforce(PolicyLossFormula):
    name: Literal["reinforce"] = "reinforce"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-A lp_new (Williams 1992; `loss.reinforce`). GPG (arXiv:2504.02546) is this loss with the advantage
        `gpg`."""
        ones_T = torch.ones_like(tokens.lp_new_T)
        return TokenLosses.of(-tokens.advantages_T * tokens.lp_new_T, ones_T)


class ImportanceSampling(PolicyLossFormula):
    name: Literal["importance_sampling"] = "importance_sampling"
    anchor: Anchor = "rollout"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-rA (Tinker's `importance_sampling`, with lp_old of the policy that sampled and a sum over tokens;
        `loss.importance_sampling`)."""
        ratio_T = ratio(tokens.lp_new_T, tokens.anchor(self.anchor))
        return TokenLosses.of(-ratio_T * tokens.advantages_T, ratio_T)


class Sapo(PolicyLossFormula):
    name: Literal["sapo"] = "sapo"
    tau_positive: Above0 = 1.0
    tau_negative: Above0 = 1.05
    anchor: Anchor = "prox"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-(4/tau) sigmoid(tau (r - 1)) A, with tau = `tau_positive` for A > 0 and `tau_negative` otherwise:
        a sigmoid gate on the ratio in place of a clip (SAPO, arXiv:2511.20347; `loss.sapo`)."""
        ratio_T = ratio(tokens.lp_new_T, tokens.anchor(self.anchor))
        positive_T = torch.full_like(ratio_T, self.tau_positive)
        negative_T = torch.full_like(ratio_T, self.tau_negative)
        tau_T = torch.where(tokens.advantages_T > 0, positive_T, negative_T)
        gate_T = 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1))
        return TokenLosses.of(-gate_T * tokens.advantages_T, ratio_T)


class TrustRegion(PolicyLossFormula):
    """Losses that drop tokens whose probability has moved too far."""

    def within(self, kept_T: Tensor, policy_T: Tensor, ratio_T: Tensor, pull_T: Tensor) -> TokenLosses:
        loss_T = torch.where(kept_T, policy_T, torch.zeros_like(policy_T)) + pull_T
        return TokenLosses.of(loss_T, ratio_T, dropped_T=~kept_T)


class Dppo(TrustRegion):
    name: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    form: Literal["ratio", "logp"] = "ratio"
    """Both forms have the same gradient for ratios up to `ratio_cap`. The value of the loss has no meaning in
    the form `logp`."""
    low: Above0 = 0.2
    high: Above0 = 0.2
    ratio_cap: Above0 = 20.0
    """The largest ratio in the form `logp`."""
    kappa: AtLeast0 = 0.0
    anchor: Anchor = "rollout"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-rA (form `ratio`) or -sg(min(r, cap)) A lp_new (form `logp`) for tokens inside the trust region,
        plus kappa · d² on every token, with d = lp_new - lp_old in nats (DPPO, arXiv:2602.04879;
        `loss.dppo_tv_ratio`, `loss.dppo_kl_ratio`, `loss.dppo_tv_logp`, `loss.dppo_kl_logp`,
        `loss.dppo_tv_plus_kl2`).

        Let p be the new and q the old probability. `tv` keeps a token if p - q <= high for A > 0, and if
        p - q >= -low otherwise. `kl` drops a token that moved in the direction of A if KL(q ‖ p) of the
        outcomes "this token" and "any other token" exceeds `high` for A > 0, and `low` otherwise, in nats."""
        lp_new_T, lp_old_T = tokens.lp_new_T, tokens.anchor(self.anchor)
        kept_T = self._may_move(lp_new_T.detach(), lp_old_T, tokens.advantages_T)
        ratio_T = ratio(lp_new_T, lp_old_T)
        if self.form == "ratio":
            policy_T = -ratio_T * tokens.advantages_T
        else:
            capped_T = ratio_T.clamp(max=self.ratio_cap)
            policy_T = weighted_logprob(capped_T, tokens.advantages_T, lp_new_T)
        return self.within(kept_T, policy_T, ratio_T, self.kappa * (lp_new_T - lp_old_T) ** 2)

    def _may_move(self, lp_new_T: Tensor, lp_old_T: Tensor, advantages_T: Tensor) -> Tensor:
        moved_T = lp_new_T.exp() - lp_old_T.exp()
        if self.divergence == "tv":
            return torch.where(advantages_T > 0, moved_T <= self.high, moved_T >= -self.low)
        far_T = bernoulli_kl(lp_old_T, lp_new_T)
        up_T, down_T = lp_new_T > lp_old_T, lp_new_T < lp_old_T
        return ~torch.where(advantages_T > 0, up_T & (far_T > self.high), down_T & (far_T > self.low))


class Ipo(TrustRegion):
    name: Literal["ipo"] = "ipo"
    limit: Above0 = 0.1
    kappa: AtLeast0 = KAPPA
    anchor: Anchor = "rollout"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-rA for tokens with |p_new - p_old| <= limit, plus kappa · d² on every token, with d = lp_new -
        lp_old in nats (prime-rl's `ipo`; `loss.ipo_symmetric_tv`)."""
        lp_new_T, lp_old_T = tokens.lp_new_T, tokens.anchor(self.anchor)
        ratio_T = ratio(lp_new_T, lp_old_T)
        kept_T = (lp_new_T.detach().exp() - lp_old_T.exp()).abs() <= self.limit
        pull_T = self.kappa * (lp_new_T - lp_old_T) ** 2
        return self.within(kept_T, -ratio_T * tokens.advantages_T, ratio_T, pull_T)


class Glm5(PolicyLossFormula):
    name: Literal["glm5"] = "glm5"
    low: Share = 0.2
    high: Above0 = 0.2
    anchor: Anchor = "rollout"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-sg(f) A lp_new, with f = r within (1 - low, 1 + high) and 0 outside. GLM-5 takes lp_old from the
        policy that sampled (`loss.rollout_is_glm5`)."""
        ratio_T = ratio(tokens.lp_new_T, tokens.anchor(self.anchor)).detach()
        kept_T = (ratio_T > 1 - self.low) & (ratio_T < 1 + self.high)
        factor_T = torch.where(kept_T, ratio_T, torch.zeros_like(ratio_T))
        loss_T = weighted_logprob(factor_T, tokens.advantages_T, tokens.lp_new_T)
        return TokenLosses.of(loss_T, ratio_T, dropped_T=~kept_T)


class Dro(PolicyLossFormula):
    name: Literal["dro"] = "dro"
    beta: Above0
    anchor: Anchor = "rollout"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """`optimistic`, with lp_old of the policy that sampled (`loss.dro`)."""
        lp_old_T = tokens.anchor(self.anchor)
        loss_T = optimistic(tokens.lp_new_T, lp_old_T, tokens.advantages_T, self.beta)
        return TokenLosses.of(loss_T, ratio(tokens.lp_new_T, lp_old_T))


class KlCov(PolicyLossFormula):
    whole_step: ClassVar[bool] = True

    name: Literal["kl_cov"] = "kl_cov"
    fraction: Share = 2e-4
    coefficient: AtLeast0 = 0.1
    anchor: Anchor = "prox"

    def losses(self, tokens: Tokens, statistics: StepStatistics) -> TokenLosses:
        """-rA, plus coefficient · |lp_new - lp_old| on the few tokens whose update would reduce the entropy
        most (KL-Cov, arXiv:2505.22617; `loss.kl_cov`)."""
        if statistics.covariance is None:
            raise ValueError("kl_cov needs the statistics of the whole step")
        chosen_T = statistics.covariance.chosen(tokens.lp_prox_T, tokens.advantages_T)
        lp_new_T, lp_old_T = tokens.lp_new_T, tokens.anchor(self.anchor)
        ratio_T = ratio(lp_new_T, lp_old_T)
        penalty_T = self.coefficient * (lp_new_T - lp_old_T).abs()
        penalty_T = torch.where(chosen_T, penalty_T, torch.zeros_like(penalty_T))
        return TokenLosses.of(-ratio_T * tokens.advantages_T + penalty_T, ratio_T)
