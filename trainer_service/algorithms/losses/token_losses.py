"""What a policy loss makes of each token."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLosses:
    """T losses, before any weight. Only `loss_T` carries gradient."""

    loss_T: Tensor
    ratio_T: Tensor
    """To the anchor: of the token, or of its row where the loss takes rows whole."""
    clipped_high_T: Tensor
    clipped_low_T: Tensor
    dual_T: Tensor
    dropped_T: Tensor
    """Out of the loss's own trust region: nothing is learned from the token's advantage."""

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
        no_T = torch.zeros_like(loss_T, dtype=torch.bool)
        return cls(
            loss_T=loss_T,
            ratio_T=ratio_T.detach(),
            clipped_high_T=no_T if clipped_high_T is None else clipped_high_T,
            clipped_low_T=no_T if clipped_low_T is None else clipped_low_T,
            dual_T=no_T if dual_T is None else dual_T,
            dropped_T=no_T if dropped_T is None else dropped_T,
        )
