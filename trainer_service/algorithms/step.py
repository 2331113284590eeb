"""What must be known of a whole optimizer step before its first micro-batch learns."""

from dataclasses import dataclass, replace

import torch

from trainer_service.algorithms.corrections.corrections import CORRECTIONS, mean_weight
from trainer_service.algorithms.corrections.masks import kept_rows, kept_tokens, m2po_bound
from trainer_service.algorithms.corrections.settings import (
    M2po,
    NoCorrection,
)
from trainer_service.algorithms.losses.kl_cov import CovarianceCut
from trainer_service.algorithms.losses.settings import (
    KlCov,
    LossSettings,
)
from trainer_service.algorithms.tokens import Tokens


@dataclass(frozen=True)
class StepStatistics:
    """Numbers over all ranks and micro-batches, which each of them then uses."""

    m2_bound: float | None = None
    """M2PO: the smallest square of a log-ratio that is left out."""
    mean_weight: float | None = None
    """What normalised weights are divided by."""
    covariance: CovarianceCut | None = None
    """KL-Cov: which tokens are held."""


@torch.no_grad()
def step_statistics(tokens: Tokens, settings: LossSettings) -> StepStatistics:
    """Of every trained token of the step, in any order, `lp_prox_T` standing for `lp_new_T`, which does not
    exist yet. Gather them from all ranks first; the result holds until the last epoch."""
    seen = replace(tokens, lp_new_T=tokens.lp_prox_T)
    seen = seen.at(seen.finite & seen.fresh)
    kept_T = kept_rows(seen, settings.masks)
    limits = [mask.limit for mask in settings.masks if isinstance(mask, M2po)]
    m2_bound = m2po_bound(seen.log_rho[kept_T], limit=min(limits)) if limits else torch.inf
    kept_T = kept_T & kept_tokens(seen, settings.masks, m2_bound)
    mean = None
    if not isinstance(settings.correction, NoCorrection) and settings.correction.normalise:
        kind = CORRECTIONS[settings.correction.name]
        weights = kind.weigh(seen, settings.correction)
        mean = mean_weight(weights, kept_T & weights.kept_T, seen.rows_T if kind.by_row else None)
    covariance = None
    if isinstance(settings.loss, KlCov):
        covariance = CovarianceCut.of(
            seen.lp_prox_T[kept_T], seen.advantages_T[kept_T], fraction=settings.loss.fraction
        )
    return StepStatistics(m2_bound if limits else None, mean, covariance)
