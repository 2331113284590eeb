"""Computes a micro-batch's share of the step's loss from its log-probabilities, in a fixed order.

LossSettings has the choices, with the defaults of the preset `default`; a choice is its own formula.

    Tokens ─ finite, fresh? ─ rows kept? ─ tokens kept? ─▶ weights ─▶ weight · loss + KL - entropy ─▶ share

The result does not depend on how rows are packed: the shares of all micro-batches, on all ranks, add up to
the step's loss, and so do their gradients. A token that is left out enters no term, but still counts in
denominators.

`loss.composite_default` is a case of `algorithms_golden.json` in the tests.
"""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from trainer_service.algorithms.aggregation import Aggregation, StepCounts, row_weights
from trainer_service.algorithms.corrections import (
    Correction,
    M2po,
    Mask,
    Outlier,
    TisToken,
    TokenWeights,
    kept_by,
)
from trainer_service.algorithms.imitation import CrossEntropy, ForwardKl, Kdrl, RefKl, ReverseKl
from trainer_service.algorithms.kl import Kl
from trainer_service.algorithms.setting_choices import AtLeast0, Frozen, by_name
from trainer_service.algorithms.tokens import Tokens
from trainer_service.algorithms.turn_losses import (
    Cispo,
    CovarianceCut,
    Dppo,
    Dro,
    Glm5,
    Gmpo,
    Gspo,
    ImportanceSampling,
    Ipo,
    KlCov,
    Ppo,
    Reinforce,
    Sapo,
    StepStatistics,
)

Loss = Annotated[
    Ppo
    | Gspo
    | Gmpo
    | Cispo
    | Reinforce
    | ImportanceSampling
    | Sapo
    | Dppo
    | Ipo
    | Glm5
    | Dro
    | KlCov
    | ReverseKl
    | RefKl
    | ForwardKl
    | Kdrl
    | CrossEntropy,
    Field(discriminator="name"),
    BeforeValidator(by_name),
]


class LossSettings(Frozen):
    """All settings between log-probabilities and the loss."""

    loss: Loss = Ppo()
    correction: Correction = TisToken()
    masks: tuple[Mask, ...] = (Outlier(),)
    """Masks leave rows or tokens out of the loss. Masks of rows apply before masks of tokens."""
    kl: Kl = Kl()
    entropy_bonus: AtLeast0 = 0.0
    """This factor times the entropy, in nats, is subtracted from the loss."""
    aggregation: Aggregation = Aggregation()

    @model_validator(mode="after")
    def _corrected_once(self) -> "LossSettings":
        if self.loss.anchored_to("rollout") and self.correction.corrects:
            raise ValueError(
                f"{self.loss.name} takes its ratio to the policy that sampled, and {self.correction.name} "
                "would correct for it a second time; set correction: none"
            )
        return self

    @property
    def whole_step(self) -> bool:
        """Whether the `StepStatistics` of the whole step must be known before its first backward pass."""
        statistical = any(mask.whole_step for mask in self.masks)
        return self.correction.normalise or self.loss.whole_step or statistical

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0

    @property
    def needs_anchor(self) -> bool:
        """Whether the loss depends on `lp_prox_T`; otherwise it only enters metrics."""
        anchored = self.loss.anchored_to("prox")
        unbiased = self.kl.estimator == "unbiased" and self.needs_reference
        return self.correction.corrects or anchored or bool(self.masks) or unbiased

    @property
    def corrects(self) -> bool:
        """Whether the loss or a correction accounts for tokens that another policy sampled."""
        return self.loss.anchored_to("rollout") or self.correction.corrects


@torch.no_grad()
def step_statistics(tokens: Tokens, settings: LossSettings) -> StepStatistics:
    """The statistics that the settings need. `tokens` are all trained tokens of the step, gathered from all
    ranks, in any order. `lp_prox_T` is used in place of `lp_new_T`, which is not known yet. The result is
    valid for all epochs of the step."""
    kept = replace(tokens, lp_new_T=tokens.lp_prox_T)
    kept = kept.at(kept.finite & kept.fresh)
    kept_T = kept_by((mask for mask in settings.masks if mask.of_rows), kept)
    strictest = min(
        (each for each in settings.masks if isinstance(each, M2po)), key=attrgetter("limit"), default=None
    )
    m2_bound = None if strictest is None else strictest.bound(kept.log_rho[kept_T])
    kept_T = kept_T & kept_by((mask for mask in settings.masks if not mask.of_rows), kept, m2_bound)
    mean, correction = None, settings.correction
    if correction.normalise:
        weights = correction.weigh(kept)
        mean = weights.mean(kept_T & weights.kept_T, kept.rows_T if correction.by_row else None)
    covariance = None
    if isinstance(settings.loss, KlCov):
        lp_T, advantages_T = kept.lp_prox_T[kept_T], kept.advantages_T[kept_T]
        covariance = CovarianceCut.of(lp_T, advantages_T, fraction=settings.loss.fraction)
    return StepStatistics(m2_bound, mean, covariance)


@dataclass(frozen=True)
class PolicyLoss:
    """A micro-batch's share of the step's loss, and its T tokens' parts in it. Only `loss` has a gradient."""

    loss: Tensor
    """The scalar to differentiate."""
    per_token_T: Tensor
    """weight · loss + KL - entropy; 0 for a token that is left out."""
    aggregation_T: Tensor
    """The weight of `per_token_T` in the step's sum."""
    kl_T: Tensor
    """The KL to the reference policy, in nats; 0 without a KL term."""
    ratio_T: Tensor
    weight_T: Tensor
    """The weight of the correction; 0 as `per_token_T`."""
    clipped_high_T: Tensor
    clipped_low_T: Tensor
    dual_T: Tensor
    dropped_T: Tensor
    """bool: outside the loss's own trust region."""
    capped_T: Tensor
    """bool: the correction's weight is at its cap."""
    kept_T: Tensor
    """bool: False for a token that a mask or the correction left out."""
    finite_T: Tensor
    """bool: False for a token with a log-probability that is not finite. It is left out, with neutral values
    in the other tensors."""


def policy_loss(
    tokens: Tokens,
    settings: LossSettings,
    counts: StepCounts,
    statistics: StepStatistics | None = None,
) -> PolicyLoss:
    """The sum over the tokens of aggregation · (weight · loss + beta · KL - bonus · entropy)
    (`loss.composite_default`).

    `counts` and `statistics` are those of the whole step, or of a part of it (see `aggregation.divisor`).
    `statistics` are needed if `settings.whole_step`. Raises ValueError if the settings need a value that is
    missing.
    """
    statistics = statistics or StepStatistics()
    finite_T = tokens.finite
    usable_T = finite_T & tokens.fresh
    usable = tokens.at(usable_T)
    weights = _weights(usable, settings, statistics)
    losses = settings.loss.losses(usable, statistics)
    kl_T = settings.kl.of(usable)
    each_T = weights.weight_T * losses.loss_T + settings.kl.coefficient * kl_T
    if settings.entropy_bonus:
        each_T = each_T - settings.entropy_bonus * _entropy(usable)
    each_T = torch.where(weights.kept_T, each_T, torch.zeros_like(each_T))
    share_T = row_weights(counts, settings.aggregation).to(each_T)[tokens.rows_T]

    def scattered(values_T: Tensor, neutral: float | bool) -> Tensor:
        all_T = torch.full_like(tokens.lp_new_T, neutral, dtype=values_T.dtype, requires_grad=False)
        return all_T.masked_scatter(usable_T, values_T.detach())

    return PolicyLoss(
        loss=(share_T[usable_T] * each_T).sum(),
        per_token_T=scattered(each_T, 0.0),
        aggregation_T=share_T,
        kl_T=scattered(kl_T, 0.0),
        ratio_T=scattered(losses.ratio_T, 1.0),
        weight_T=scattered(weights.weight_T, 0.0),
        clipped_high_T=scattered(losses.clipped_high_T, False),
        clipped_low_T=scattered(losses.clipped_low_T, False),
        dual_T=scattered(losses.dual_T, False),
        dropped_T=scattered(losses.dropped_T, False),
        capped_T=scattered(weights.capped_T, False),
        kept_T=scattered(weights.kept_T, False),
        finite_T=finite_T,
    )


def _weights(usable: Tokens, settings: LossSettings, statistics: StepStatistics) -> TokenWeights:
    """Applies the masks of rows and of tokens, and the correction. A token that one of them drops gets weight
    0."""
    if statistics.m2_bound is None and any(mask.whole_step for mask in settings.masks):
        raise ValueError("m2po needs the statistics of the whole step")
    kept_T = kept_by(settings.masks, usable, statistics.m2_bound)
    weights = settings.correction.weigh(usable)
    if settings.correction.normalise:
        if statistics.mean_weight is None:
            raise ValueError("normalised weights need the statistics of the whole step")
        weights = weights.normalised(statistics.mean_weight)
    kept_T = kept_T & weights.kept_T
    return replace(
        weights,
        weight_T=torch.where(kept_T, weights.weight_T, torch.zeros_like(weights.weight_T)),
        kept_T=kept_T,
        capped_T=weights.capped_T & kept_T,
    )


def _entropy(usable: Tokens) -> Tensor:
    if usable.entropy_T is None:
        raise ValueError("an entropy bonus needs entropy_T")
    return usable.entropy_T
