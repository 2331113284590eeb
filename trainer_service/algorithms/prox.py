"""Approximates log-probabilities under the weights before the step, without a forward pass.

`prox.loglinear` is a case of `algorithms_golden.json` in the tests.
"""

from torch import Tensor


def loglinear(lp_new_T: Tensor, lp_roll_T: Tensor, versions_T: Tensor, *, version: int) -> Tensor:
    """[T] in nats, without gradient: lp_roll + alpha (lp_new - lp_roll), with alpha from
    `interpolation_weight` (AReaL's `loglinear`; `prox.loglinear`). `version` is what the step makes."""
    alpha_T = interpolation_weight(versions_T, version=version).to(lp_new_T.dtype)
    return (lp_roll_T + alpha_T * (lp_new_T - lp_roll_T)).detach()


def interpolation_weight(versions_T: Tensor, *, version: int) -> Tensor:
    """[T] float64 in [0, 1): alpha = (v - 1 - b) / (v - b) for a token that version b sampled, in the step
    that makes version v. For b >= v - 1 it is 0, since the step begins with version v - 1."""
    age_T = (version - versions_T).double()
    return (age_T - 1).clamp(min=0) / age_T.clamp(min=1)
