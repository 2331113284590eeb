"""Importance weights for tokens to which trainer and engine give different probabilities.

rho = exp(log_rho) with log_rho = lp_prox - lp_roll, in nats: a token's log-probability before the step, minus
that with which the engine sampled it. A weight multiplies the loss of its token.

Names in backticks with a dot, such as `is.tis_token_2`, are cases of `algorithms_golden.json` in the tests.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from trainer_service.algorithms.fields import Above0, AtLeast0, Frozen, Within, by_name
from trainer_service.algorithms.tokens import RowIndex, Tokens, bounded


@dataclass(frozen=True)
class TokenWeights:
    """The weights of T tokens."""

    weight_T: Tensor
    kept_T: Tensor
    """bool: False for a token that the correction left out, with weight 0."""
    capped_T: Tensor
    """bool: True for a ratio that reached the cap."""

    @classmethod
    def capped(cls, rho_T: Tensor, cap: float) -> "TokenWeights":
        return cls(rho_T.clamp(max=cap), torch.ones_like(rho_T, dtype=torch.bool), rho_T >= cap)

    def normalised(self, mean: float) -> "TokenWeights":
        """The weights, divided by the step's mean weight (`is.tis_token_2_batchnorm`)."""
        return replace(self, weight_T=self.weight_T / mean)

    def mean(self, kept_T: Tensor, rows_T: Tensor | None = None) -> float:
        """The mean weight of the kept tokens of the whole step. If the tokens of a row share one weight, pass
        `rows_T`: then the mean is over rows. The result is 1 if no token is kept or all weights are 0."""
        weight_T = self.weight_T[kept_T].double()
        if rows_T is not None:
            weight_T = RowIndex.of(rows_T[kept_T]).mean(weight_T)
        mean = float(weight_T.mean()) if len(weight_T) else 0.0
        return mean if mean > 0 else 1.0


class NoCorrection(Frozen):
    corrects: ClassVar[bool] = False
    by_row: ClassVar[bool] = False
    normalise: ClassVar[bool] = False

    name: Literal["none"] = "none"

    def weigh(self, tokens: Tokens) -> TokenWeights:
        """Gives every token the weight 1."""
        kept_T = torch.ones_like(tokens.log_rho, dtype=torch.bool)
        return TokenWeights(torch.ones_like(tokens.log_rho), kept_T, ~kept_T)


class TisToken(Frozen):
    """With `ppo` and a cap of 5, this is decoupled PPO in mode `clamp`."""

    corrects: ClassVar[bool] = True
    by_row: ClassVar[bool] = False

    name: Literal["tis_token"] = "tis_token"
    cap: Above0 = 2.0
    normalise: bool = False
    """Divide the weights by their mean over the whole step."""

    def weigh(self, tokens: Tokens) -> TokenWeights:
        """min(rho, cap): truncated importance sampling (Ionides 2008), and decoupled PPO in mode `clamp`
        (`is.tis_token_2`, `loss.decoupled_ppo_clamp5`)."""
        return TokenWeights.capped(bounded(tokens.log_rho).exp(), self.cap)


class TisSequence(Frozen):
    corrects: ClassVar[bool] = True
    by_row: ClassVar[bool] = True
    """All tokens of a row have the same weight."""

    name: Literal["tis_sequence"] = "tis_sequence"
    cap: Above0 = 5.0
    normalise: bool = False

    def weigh(self, tokens: Tokens) -> TokenWeights:
        """min(product of the rho of the row, cap), for each token of the row (`is.tis_seq_5`)."""
        rows = RowIndex.of(tokens.rows_T)
        return TokenWeights.capped(rows.at_tokens(bounded(rows.sum(tokens.log_rho)).exp()), self.cap)


class Icepop(Within):
    """With `ppo` and bounds of 0 and 5, this is decoupled PPO in mode `mask`."""

    corrects: ClassVar[bool] = True
    by_row: ClassVar[bool] = False

    name: Literal["icepop"] = "icepop"
    low: AtLeast0 = 0.5
    high: Above0 = 5.0
    normalise: bool = False

    def weigh(self, tokens: Tokens) -> TokenWeights:
        """rho within [low, high], and 0 outside (IcePop; `is.icepop_0.5_5`). With bounds of 0 and 5 it is
        decoupled PPO in mode `mask` (`loss.decoupled_ppo_mask5`)."""
        rho_T = bounded(tokens.log_rho).exp()
        kept_T = (rho_T >= self.low) & (rho_T <= self.high)
        weight_T = torch.where(kept_T, rho_T, torch.zeros_like(rho_T))
        return TokenWeights(weight_T, kept_T, torch.zeros_like(kept_T))


Correction = Annotated[
    NoCorrection | TisToken | TisSequence | Icepop,
    Field(discriminator="name"),
    BeforeValidator(by_name),
]
