"""KL-Cov: the few tokens that would cost most entropy are held where they are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import (
    KL_COV_COEFFICIENT,
    KL_COV_FRACTION,
)
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.ratios import ratio


@dataclass(frozen=True)
class CovarianceCut:
    """Of the whole step's tokens: the means of advantage and log-probability, and what the chosen reach."""

    advantage: float
    logprob: float
    bound: float

    @classmethod
    def of(cls, lp_T: Tensor, advantages_T: Tensor, *, fraction: float = KL_COV_FRACTION) -> "CovarianceCut":
        """The largest `fraction` of (A - mean A)(lp - mean lp), one at least; ties are all chosen."""
        if len(lp_T) == 0:
            return cls(0.0, 0.0, torch.inf)
        lp_T, advantages_T = lp_T.double(), advantages_T.double()
        open_cut = cls(float(advantages_T.mean()), float(lp_T.mean()), -torch.inf)
        chosen = max(1, int(len(lp_T) * fraction))
        bound = open_cut.covariance(lp_T, advantages_T).topk(chosen).values[-1]
        return cls(open_cut.advantage, open_cut.logprob, float(bound))

    def covariance(self, lp_T: Tensor, advantages_T: Tensor) -> Tensor:
        return (advantages_T.double() - self.advantage) * (lp_T.double() - self.logprob)

    def chosen(self, lp_T: Tensor, advantages_T: Tensor) -> Tensor:
        chosen_T: Tensor = self.covariance(lp_T, advantages_T) >= self.bound
        return chosen_T


def kl_cov(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    chosen_T: Tensor,
    *,
    coefficient: float = KL_COV_COEFFICIENT,
) -> TokenLosses:
    """-rA, and coefficient · |lp_new - lp_old| on the chosen (arXiv:2505.22617; `loss.kl_cov`)."""
    ratio_T = ratio(lp_new_T, lp_old_T)
    held_T = coefficient * (lp_new_T - lp_old_T).abs()
    loss_T = -ratio_T * advantages_T + torch.where(chosen_T, held_T, torch.zeros_like(held_T))
    return TokenLosses.of(loss_T, ratio_T)
