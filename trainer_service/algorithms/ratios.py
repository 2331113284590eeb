"""Computes bounded ratios and divergences from log-probabilities of two policies, in float32 or better.

`mask.kpop_binary_kl` is a case of `algorithms_golden.json` in the tests.
"""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Nats. Log-ratios are clipped to ± this value, and have gradient 0 outside."""
MAX_LOGPROB = -1e-7
"""Nats. `bernoulli_kl` clips log-probabilities p to at most this value, so that log(1 - exp(p)) is finite."""


def widened(values: Tensor) -> Tensor:
    """The values in float32; values in float64 stay as they are."""
    return values if values.dtype == torch.float64 else values.float()


def bounded(log_ratio: Tensor) -> Tensor:
    """The log-ratio, clipped to ± `LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(lp_upper_T: Tensor, lp_lower_T: Tensor) -> Tensor:
    """[T] exp(clip(lp_upper - lp_lower, ± 20)). The ratio of the new policy to the old is called r, that of
    the trainer to the engine rho."""
    return bounded(lp_upper_T - lp_lower_T).exp()


def bernoulli_kl(lp_p_T: Tensor, lp_q_T: Tensor) -> Tensor:
    """[T] in nats: KL(p ‖ q) of the two outcomes "this token" and "any other token": p log(p/q) + (1-p)
    log((1-p)/(1-q)) (DPPO, arXiv:2602.04879; `mask.kpop_binary_kl`)."""
    lp_p_T, lp_q_T = lp_p_T.clamp(max=MAX_LOGPROB), lp_q_T.clamp(max=MAX_LOGPROB)
    other_p_T, other_q_T = -torch.expm1(lp_p_T), -torch.expm1(lp_q_T)
    return lp_p_T.exp() * (lp_p_T - lp_q_T) + other_p_T * (other_p_T.log() - other_q_T.log())
