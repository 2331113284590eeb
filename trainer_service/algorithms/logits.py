"""Computes the sampled token's log-probability and the entropy from logits, at the sampling temperature.

Names such as `logits.logp_entropy_T1.0` are cases of `algorithms_golden.json` in the tests.
"""

import torch
from torch import Tensor

from trainer_service.algorithms.tokens import widened


def selected_logprobs(logits_TV: Tensor, targets: Tensor, temperatures_T: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each target, [T] or [T, K] as `targets` are, and the entropy [T] without gradient, in nats, at
    the temperature of the sampled token (`logits.logp_entropy_T1.0`, `logits.logp_entropy_T0.7`).

    A token with logit -inf has probability 0; the probabilities of the others sum to 1
    (`logits.topk3_renormalised_logp`).
    """
    scaled_TV = _scaled(logits_TV, temperatures_T)
    logprobs = _selected(scaled_TV, targets)
    with torch.no_grad():
        entropy_T = _entropy(scaled_TV)
    return logprobs, entropy_T


def entropies(logits_TV: Tensor, temperatures_T: Tensor) -> Tensor:
    """[T] in nats: logsumexp(z) - sum of p · z, with gradient, for an entropy bonus. A token of probability 0
    adds 0, and gets the gradient 0."""
    return _entropy(_scaled(logits_TV, temperatures_T))


def _scaled(logits_TV: Tensor, temperatures_T: Tensor) -> Tensor:
    return widened(logits_TV) / temperatures_T[:, None]


def _selected(scaled_TV: Tensor, targets: Tensor) -> Tensor:
    chosen_TK = scaled_TV.gather(-1, targets if targets.dim() == 2 else targets[:, None])
    return (chosen_TK - torch.logsumexp(scaled_TV, dim=-1, keepdim=True)).view_as(targets)


def _entropy(scaled_TV: Tensor) -> Tensor:
    normaliser_T = torch.logsumexp(scaled_TV, dim=-1)
    p_TV = (scaled_TV - normaliser_T[:, None]).exp()
    return normaliser_T - (p_TV * scaled_TV.masked_fill(p_TV == 0, 0)).sum(-1)  # 0 · -inf would be NaN
