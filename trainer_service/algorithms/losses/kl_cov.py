"""KL-Cov: a KL penalty on the few tokens whose update would reduce the entropy most.

`loss.kl_cov` is a case of `algorithms_golden.json` in the tests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_service.algorithms.losses.settings import KL_COV_COEFFICIENT, KL_COV_FRACTION
from trainer_service.algorithms.losses.token_losses import TokenLosses
from trainer_service.algorithms.tokens import ratio


@dataclass(frozen=True)
class CovarianceCut:
    """Chooses the tokens to penalise: those with the largest part in the step's covariance of A and lp."""

    advantage: float
    """The mean advantage of the step's tokens."""
    logprob: float
    """The mean log-probability of the step's tokens, in nats."""
    bound: float
    """The smallest (A - mean A)(lp - mean lp) of a penalised token."""

    @classmethod
    def of(cls, lp_T: Tensor, advantages_T: Tensor, *, fraction: float = KL_COV_FRACTION) -> "CovarianceCut":
        """Chooses the `fraction` of tokens with the largest (A - mean A)(lp - mean lp), at least one
        token."""
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


def kl_cov(
    lp_new_T: Tensor,
    lp_old_T: Tensor,
    advantages_T: Tensor,
    chosen_T: Tensor,
    *,
    coefficient: float = KL_COV_COEFFICIENT,
) -> TokenLosses:
    """-rA, plus coefficient · |lp_new - lp_old| on the chosen tokens (KL-Cov, arXiv:2505.22617;
    `loss.kl_cov`)."""
    ratio_T = ratio(lp_new_T, lp_old_T)
    penalty_T = coefficient * (lp_new_T - lp_old_T).abs()
    loss_T = -ratio_T * advantages_T + torch.where(chosen_T, penalty_T, torch.zeros_like(penalty_T))
    return TokenLosses.of(loss_T, ratio_T)
