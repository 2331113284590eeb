"""The result of a policy loss: one loss for each token, and whether the token was clipped."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLosses:
    """T losses, before any weight. Only `loss_T` has a gradient."""

    loss_T: Tensor
    ratio_T: Tensor
    """The ratio to the anchor policy: of the token, or of its row for losses on whole rows."""
    clipped_high_T: Tensor
    """bool: clipped from above, for a positive advantage."""
    clipped_low_T: Tensor
    """bool: clipped from below, for a negative advantage."""
    dual_T: Tensor
    """bool: at the ceiling of the dual clip."""
    dropped_T: Tensor
    """bool: outside the loss's own trust region, so that the advantage gives no gradient."""

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
        none_T = torch.zeros_like(loss_T, dtype=torch.bool)
        return cls(
            loss_T=loss_T,
            ratio_T=ratio_T.detach(),
            clipped_high_T=none_T if clipped_high_T is None else clipped_high_T,
            clipped_low_T=none_T if clipped_low_T is None else clipped_low_T,
            dual_T=none_T if dual_T is None else dual_T,
            dropped_T=none_T if dropped_T is None else dropped_T,
        )
