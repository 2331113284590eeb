"""The policy losses by name: each takes tokens and its settings, and returns a loss for every token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer_service.algorithms.kl import KLS
from trainer_service.algorithms.losses import settings as settings
from trainer_service.algorithms.losses.cispo import cispo, glm5
from trainer_service.algorithms.losses.distillation import cross_entropy, forward_kl, kdrl, ref_kl, reverse_kl
from trainer_service.algorithms.losses.gmpo import gmpo
from trainer_service.algorithms.losses.kl_cov import kl_cov
from trainer_service.algorithms.losses.ppo import gspo, ppo
from trainer_service.algorithms.losses.reinforce import dro, importance_sampling, reinforce
from trainer_service.algorithms.losses.sapo import sapo
from trainer_service.algorithms.losses.step_statistics import StepStatistics
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.losses.trust_region import dppo, ipo
from trainer_service.algorithms.tokens import Tokens


@dataclass(frozen=True)
class LossKind:
    """One policy loss."""

    settings: type[Any]
    losses: Callable[[Tokens, Any, StepStatistics], TokenLosses]


def _ratio_arguments(tokens: Tokens, chosen: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tokens.lp_new_T, tokens.anchor(chosen.anchor), tokens.advantages_T


def _ppo(tokens: Tokens, chosen: settings.Ppo | settings.Kdrl, _: StepStatistics) -> TokenLosses:
    return ppo(
        *_ratio_arguments(tokens, chosen),
        clip_low=chosen.clip_low,
        clip_high=chosen.clip_high,
        dual_clip=chosen.dual_clip,
    )


def _gspo(tokens: Tokens, chosen: settings.Gspo, _: StepStatistics) -> TokenLosses:
    return gspo(
        *_ratio_arguments(tokens, chosen), tokens.rows_T, clip_low=chosen.clip_low, clip_high=chosen.clip_high
    )


def _gmpo(tokens: Tokens, chosen: settings.Gmpo, _: StepStatistics) -> TokenLosses:
    return gmpo(
        *_ratio_arguments(tokens, chosen), tokens.rows_T, clip_low=chosen.clip_low, clip_high=chosen.clip_high
    )


def _sapo(tokens: Tokens, chosen: settings.Sapo, _: StepStatistics) -> TokenLosses:
    return sapo(
        *_ratio_arguments(tokens, chosen), tau_positive=chosen.tau_positive, tau_negative=chosen.tau_negative
    )


def _dppo(tokens: Tokens, chosen: settings.Dppo, _: StepStatistics) -> TokenLosses:
    return dppo(
        *_ratio_arguments(tokens, chosen),
        divergence=chosen.divergence,
        form=chosen.form,
        low=chosen.low,
        high=chosen.high,
        ratio_cap=chosen.ratio_cap,
        kappa=chosen.kappa,
    )


def _kl_cov(tokens: Tokens, chosen: settings.KlCov, statistics: StepStatistics) -> TokenLosses:
    if statistics.covariance is None:
        raise ValueError("kl_cov needs the statistics of the whole step")
    chosen_T = statistics.covariance.chosen(tokens.lp_prox_T, tokens.advantages_T)
    return kl_cov(*_ratio_arguments(tokens, chosen), chosen_T, coefficient=chosen.coefficient)


def _reverse_kl(tokens: Tokens, chosen: settings.ReverseKl, _: StepStatistics) -> TokenLosses:
    return reverse_kl(tokens.lp_new_T, tokens.anchor(chosen.anchor), tokens.teacher())


def _ref_kl(tokens: Tokens, chosen: settings.RefKl, _: StepStatistics) -> TokenLosses:
    lp_old_T = tokens.anchor(chosen.anchor)
    return ref_kl(tokens.lp_new_T, lp_old_T, tokens.teacher(), low=chosen.low, kappa=chosen.kappa)


def _kdrl(tokens: Tokens, chosen: settings.Kdrl, statistics: StepStatistics) -> TokenLosses:
    if chosen.estimator == "top_k":
        distance_T = tokens.teacher_kl()
    else:
        distance_T = KLS[chosen.estimator](tokens.lp_new_T, tokens.teacher(), tokens.lp_prox_T)
    return kdrl(_ppo(tokens, chosen, statistics), distance_T, coefficient=chosen.coefficient)


LOSSES: Mapping[str, LossKind] = {
    "ppo": LossKind(settings.Ppo, _ppo),
    "gspo": LossKind(settings.Gspo, _gspo),
    "gmpo": LossKind(settings.Gmpo, _gmpo),
    "cispo": LossKind(settings.Cispo, lambda t, s, _: cispo(*_ratio_arguments(t, s), low=s.low, high=s.high)),
    "reinforce": LossKind(settings.Reinforce, lambda t, _, __: reinforce(t.lp_new_T, t.advantages_T)),
    "importance_sampling": LossKind(
        settings.ImportanceSampling, lambda t, s, _: importance_sampling(*_ratio_arguments(t, s))
    ),
    "sapo": LossKind(settings.Sapo, _sapo),
    "dppo": LossKind(settings.Dppo, _dppo),
    "ipo": LossKind(settings.Ipo, lambda t, s, _: ipo(*_ratio_arguments(t, s), limit=s.limit, kappa=s.kappa)),
    "glm5": LossKind(settings.Glm5, lambda t, s, _: glm5(*_ratio_arguments(t, s), low=s.low, high=s.high)),
    "dro": LossKind(settings.Dro, lambda t, s, _: dro(*_ratio_arguments(t, s), beta=s.beta)),
    "kl_cov": LossKind(settings.KlCov, _kl_cov),
    "reverse_kl": LossKind(settings.ReverseKl, _reverse_kl),
    "ref_kl": LossKind(settings.RefKl, _ref_kl),
    "forward_kl": LossKind(settings.ForwardKl, lambda t, _, __: forward_kl(t.teacher_kl())),
    "kdrl": LossKind(settings.Kdrl, _kdrl),
    "cross_entropy": LossKind(settings.CrossEntropy, lambda t, _, __: cross_entropy(t.lp_new_T)),
}
