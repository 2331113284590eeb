"""Gradients of what a head returns."""

import torch
from torch import Tensor


def gradients(made_T2: Tensor, factors: list[Tensor], with_entropy: bool) -> list[Tensor]:
    """Those of the factors, in float32: of a sum of log p, and of entropies if asked for, each with a random
    weight."""
    slope_T2 = torch.randn(made_T2.shape, generator=torch.Generator().manual_seed(1)).to(made_T2.device)
    if not with_entropy:
        made_T2, slope_T2 = made_T2[:, 0], slope_T2[:, 0]
    return [each.float() for each in torch.autograd.grad((made_T2 * slope_T2).sum(), factors)]
