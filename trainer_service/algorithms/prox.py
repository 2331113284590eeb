"""What the step begins with, guessed between what sampled a token and what learns from it."""

from torch import Tensor


def loglinear(lp_new_T: Tensor, lp_roll_T: Tensor, versions_T: Tensor, *, version: int) -> Tensor:
    """lp_roll + alpha (lp_new - lp_roll), in nats, without gradient: no forward pass of its own (AReaL's
    `loglinear`; `prox.loglinear`)."""
    alpha_T = way_to_prox(versions_T, version=version).to(lp_new_T.dtype)
    return (lp_roll_T + alpha_T * (lp_new_T - lp_roll_T)).detach()


def way_to_prox(versions_T: Tensor, *, version: int) -> Tensor:
    """alpha = (v - 1 - b) / (v - b) of a token that version b sampled and that the step to v learns from; 0
    for b >= v - 1, which the step begins with. float64 [T] in [0, 1)."""
    age_T = (version - versions_T).double()
    return (age_T - 1).clamp(min=0) / age_T.clamp(min=1)
