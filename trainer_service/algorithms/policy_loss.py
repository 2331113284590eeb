"""From what the policies say of a micro-batch to its share of the step's loss, in one order.

    Tokens ─ finite, fresh? ─ rows kept? ─ tokens kept? ─▶ weights ─▶ weight · loss + KL - entropy ─▶ share

Nothing depends on how rows are packed: the shares of all micro-batches, on all ranks, add up to the step's
loss, and so do their gradients. What is left out is left out of every term, and still counts in denominators.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer_service.algorithms.aggregation import StepCounts, row_weights
from trainer_service.algorithms.corrections.corrections import CORRECTIONS, Weights, normalised
from trainer_service.algorithms.corrections.masks import kept_rows, kept_tokens
from trainer_service.algorithms.corrections.settings import (
    M2po,
    NoCorrection,
)
from trainer_service.algorithms.kl import KLS
from trainer_service.algorithms.losses.registry import LOSSES
from trainer_service.algorithms.losses.settings import (
    LossSettings,
)
from trainer_service.algorithms.step import StepStatistics
from trainer_service.algorithms.tokens import Tokens


@dataclass(frozen=True)
class PolicyLoss:
    """A micro-batch's share of the loss, and what became of its T tokens. Only `loss` carries gradient."""

    loss: Tensor
    """The scalar to differentiate."""
    per_token_T: Tensor
    """What the step's sum weighs: weight · loss + KL - entropy; 0 where a token is left out."""
    aggregation_T: Tensor
    """What each token counts in that sum."""
    kl_T: Tensor
    """To the reference policy, in nats; 0 where none is asked for."""
    ratio_T: Tensor
    weight_T: Tensor
    """Of the correction; 0 where a token is left out."""
    clipped_high_T: Tensor
    clipped_low_T: Tensor
    dual_T: Tensor
    dropped_T: Tensor
    """Outside the loss's own trust region."""
    capped_T: Tensor
    """The correction's weight is the largest that it may be."""
    kept_T: Tensor
    """False where the weight was set to 0."""
    finite_T: Tensor
    """False where a log-probability is not a number: such a token is left out, with neutral values here."""


def policy_loss(
    tokens: Tokens,
    settings: LossSettings,
    counts: StepCounts,
    statistics: StepStatistics | None = None,
) -> PolicyLoss:
    """sum of aggregation · (weight · loss + beta · KL - bonus · entropy) (spec §3, in its order;
    `loss.composite_default`). `counts` and `statistics` are of the whole step, or of a part that stands for
    it; the latter are needed where `settings.whole_step`. Raises ValueError for what the settings need and
    nobody gave."""
    statistics = statistics or StepStatistics()
    finite_T = tokens.finite
    seen_T = finite_T & tokens.fresh
    seen = tokens.at(seen_T)
    weights = _weights(seen, settings, statistics)
    losses = LOSSES[settings.loss.name].losses(seen, settings.loss, statistics)
    kl_T = _kl(seen, settings)
    each_T = weights.weight_T * losses.loss_T + settings.kl.coefficient * kl_T
    if settings.entropy_bonus:
        each_T = each_T - settings.entropy_bonus * _entropy(seen)
    each_T = torch.where(weights.kept_T, each_T, torch.zeros_like(each_T))
    share_T = row_weights(counts, settings.aggregation).to(each_T)[tokens.rows_T]

    def back(values_T: Tensor, neutral: float | bool) -> Tensor:
        all_T = torch.full_like(tokens.lp_new_T, neutral, dtype=values_T.dtype, requires_grad=False)
        return all_T.masked_scatter(seen_T, values_T.detach())

    return PolicyLoss(
        loss=(share_T[seen_T] * each_T).sum(),
        per_token_T=back(each_T, 0.0),
        aggregation_T=share_T,
        kl_T=back(kl_T, 0.0),
        ratio_T=back(losses.ratio_T, 1.0),
        weight_T=back(weights.weight_T, 0.0),
        clipped_high_T=back(losses.clipped_high_T, False),
        clipped_low_T=back(losses.clipped_low_T, False),
        dual_T=back(losses.dual_T, False),
        dropped_T=back(losses.dropped_T, False),
        capped_T=back(weights.capped_T, False),
        kept_T=back(weights.kept_T, False),
        finite_T=finite_T,
    )


def _weights(seen: Tokens, settings: LossSettings, statistics: StepStatistics) -> Weights:
    """Masks of rows, masks of tokens, then the correction of what survives both."""
    if statistics.m2_bound is None and any(isinstance(mask, M2po) for mask in settings.masks):
        raise ValueError("m2po needs the statistics of the whole step")
    bound = torch.inf if statistics.m2_bound is None else statistics.m2_bound
    kept_T = kept_rows(seen, settings.masks) & kept_tokens(seen, settings.masks, bound)
    weights = CORRECTIONS[settings.correction.name].weigh(seen, settings.correction)
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


def _kl(seen: Tokens, settings: LossSettings) -> Tensor:
    if not settings.kl.coefficient:
        return torch.zeros_like(seen.lp_prox_T)
    return KLS[settings.kl.estimator](seen.lp_new_T, seen.reference(), seen.lp_prox_T)


def _entropy(seen: Tokens) -> Tensor:
    if seen.entropy_T is None:
        raise ValueError("an entropy bonus needs entropy_T")
    return seen.entropy_T
