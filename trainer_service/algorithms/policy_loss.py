"""Computes a micro-batch's share of the step's loss from its log-probabilities, in a fixed order.

    Tokens ─ finite, fresh? ─ rows kept? ─ tokens kept? ─▶ weights ─▶ weight · loss + KL - entropy ─▶ share

The result does not depend on how rows are packed: the shares of all micro-batches, on all ranks, add up to
the step's loss, and so do their gradients. A token that is left out enters no term, but still counts in
denominators.

`loss.composite_default` is a case of `algorithms_golden.json` in the tests.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer_service.algorithms.aggregation import StepCounts, row_weights
from trainer_service.algorithms.corrections.corrections import CORRECTIONS, TokenWeights, normalised
from trainer_service.algorithms.corrections.masks import kept_rows, kept_tokens
from trainer_service.algorithms.corrections.settings import M2po, NoCorrection
from trainer_service.algorithms.kl import KLS
from trainer_service.algorithms.losses.registry import LOSSES
from trainer_service.algorithms.losses.settings import LossSettings
from trainer_service.algorithms.losses.step_statistics import StepStatistics
from trainer_service.algorithms.tokens import Tokens


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
    """The weight of the correction; 0 for a token that is left out."""
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
    losses = LOSSES[settings.loss.name].losses(usable, settings.loss, statistics)
    kl_T = _kl(usable, settings)
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
    if statistics.m2_bound is None and any(isinstance(mask, M2po) for mask in settings.masks):
        raise ValueError("m2po needs the statistics of the whole step")
    bound = torch.inf if statistics.m2_bound is None else statistics.m2_bound
    kept_T = kept_rows(usable, settings.masks) & kept_tokens(usable, settings.masks, bound)
    weights = CORRECTIONS[settings.correction.name].weigh(usable, settings.correction)
    if not isinstance(settings.correction, NoCorrection) and settings.correction.normalise:
        if statistics.mean_weight is None:
            raise ValueError("normalised weights need the statistics of the whole step")
        weights = normalised(weights, statistics.mean_weight)
    kept_T = kept_T & weights.kept_T
    return replace(
        weights,
        weight_T=torch.where(kept_T, weights.weight_T, torch.zeros_like(weights.weight_T)),
        kept_T=kept_T,
        capped_T=weights.capped_T & kept_T,
    )


def _kl(usable: Tokens, settings: LossSettings) -> Tensor:
    if not settings.kl.coefficient:
        return torch.zeros_like(usable.lp_prox_T)
    return KLS[settings.kl.estimator](usable.lp_new_T, usable.reference(), usable.lp_prox_T)


def _entropy(usable: Tokens) -> Tensor:
    if usable.entropy_T is None:
        raise ValueError("an entropy bonus needs entropy_T")
    return usable.entropy_T
