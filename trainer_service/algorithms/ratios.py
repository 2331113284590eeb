"""How likely two policies find the same token: log-probabilities to bounded ratios, in float32 or better."""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Nats. Beyond it a ratio is a number without meaning, and its gradient is 0 (spec §0)."""
NEVER_CERTAIN = -1e-7
"""Nats. The largest log-probability whose complement still has a logarithm in float32."""


def widened(values: Tensor) -> Tensor:
    """float32 or better: narrow numbers are cast up, none is cast down."""
    return values if values.dtype == torch.float64 else values.float()


def bounded(log_ratio: Tensor) -> Tensor:
    """Within ± `LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(lp_upper_T: Tensor, lp_lower_T: Tensor) -> Tensor:
    """exp(clip(lp_upper - lp_lower, ±20)): r of new to old, rho of trainer to engine (spec §0)."""
    return bounded(lp_upper_T - lp_lower_T).exp()


def bernoulli_kl(lp_p_T: Tensor, lp_q_T: Tensor) -> Tensor:
    """KL(p ‖ q) in nats of "this token or any other": p log(p/q) + (1-p) log((1-p)/(1-q)) (spec §2, §3)."""
    lp_p_T, lp_q_T = lp_p_T.clamp(max=NEVER_CERTAIN), lp_q_T.clamp(max=NEVER_CERTAIN)
    other_p_T, other_q_T = -torch.expm1(lp_p_T), -torch.expm1(lp_q_T)
    return lp_p_T.exp() * (lp_p_T - lp_q_T) + other_p_T * (other_p_T.log() - other_q_T.log())
