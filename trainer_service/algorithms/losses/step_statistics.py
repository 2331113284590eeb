"""Computes statistics of a whole optimizer step, before the step's first backward pass."""

from dataclasses import dataclass, replace

import torch

from trainer_service.algorithms.corrections.corrections import CORRECTIONS, mean_weight
from trainer_service.algorithms.corrections.masks import kept_rows, kept_tokens, m2po_bound
from trainer_service.algorithms.corrections.settings import M2po, NoCorrection
from trainer_service.algorithms.losses.kl_cov import CovarianceCut
from trainer_service.algorithms.losses.settings import KlCov, LossSettings
from trainer_service.algorithms.tokens import Tokens


@dataclass(frozen=True)
class StepStatistics:
    """Statistics over the tokens of all ranks and micro-batches, which every micro-batch uses."""

    m2_bound: float | None = None
    """M2PO: the smallest squared log-ratio that is masked, in nats²."""
    mean_weight: float | None = None
    """The divisor of normalised correction weights."""
    covariance: CovarianceCut | None = None
    """KL-Cov: chooses the tokens that get the KL penalty."""


@torch.no_grad()
def step_statistics(tokens: Tokens, settings: LossSettings) -> StepStatistics:
    """The statistics that the settings need. `tokens` are all trained tokens of the step, gathered from all
    ranks, in any order. `lp_prox_T` is used in place of `lp_new_T`, which is not known yet. The result is
    valid for all epochs of the step."""
    kept = replace(tokens, lp_new_T=tokens.lp_prox_T)
    kept = kept.at(kept.finite & kept.fresh)
    kept_T = kept_rows(kept, settings.masks)
    limits = [mask.limit for mask in settings.masks if isinstance(mask, M2po)]
    m2_bound = m2po_bound(kept.log_rho[kept_T], limit=min(limits)) if limits else torch.inf
    kept_T = kept_T & kept_tokens(kept, settings.masks, m2_bound)
    mean = None
    if not isinstance(settings.correction, NoCorrection) and settings.correction.normalise:
        kind = CORRECTIONS[settings.correction.name]
        weights = kind.weigh(kept, settings.correction)
        mean = mean_weight(weights, kept_T & weights.kept_T, kept.rows_T if kind.by_row else None)
    covariance = None
    if isinstance(settings.loss, KlCov):
        covariance = CovarianceCut.of(
            kept.lp_prox_T[kept_T], kept.advantages_T[kept_T], fraction=settings.loss.fraction
        )
    return StepStatistics(m2_bound if limits else None, mean, covariance)
