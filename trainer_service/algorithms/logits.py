"""From logits to the log-probability of the sampled token, and to the entropy, as the sampler saw them."""

import torch
from torch import Tensor

from trainer_service.algorithms.ratios import widened


def selected_logprobs(logits_TV: Tensor, targets_T: Tensor, temperatures_T: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each target, and the entropy without gradient, in nats, at the temperature that it was sampled
    with (`logits.logp_entropy_T1.0`, `logits.logp_entropy_T0.7`)."""
    scaled_TV = _scaled(logits_TV, temperatures_T)
    logprobs_T = _selected(scaled_TV, targets_T)
    with torch.no_grad():
        entropy_T = _entropy(scaled_TV)
    return logprobs_T, entropy_T


def entropies(logits_TV: Tensor, temperatures_T: Tensor) -> Tensor:
    """lse(z) - sum of p z, in nats, with gradient: for a bonus (spec §6)."""
    return _entropy(_scaled(logits_TV, temperatures_T))


def renormalised_logprobs(
    logits_TV: Tensor, targets_T: Tensor, temperatures_T: Tensor, kept_TV: Tensor
) -> Tensor:
    """log p among the tokens that the sampler kept, by top-k or top-p; -inf for a target that it did not
    keep. Real data has none of those; the loss leaves them out (`logits.topk3_renormalised_logp`)."""
    return _selected(_scaled(logits_TV, temperatures_T).masked_fill(~kept_TV, -torch.inf), targets_T)


def top_k(logits_TV: Tensor, k: int) -> Tensor:
    """Which tokens a sampler with this k keeps; those that tie with the last are all kept."""
    kept_TV: Tensor = logits_TV >= logits_TV.topk(k, dim=-1).values[:, -1:]
    return kept_TV


def _scaled(logits_TV: Tensor, temperatures_T: Tensor) -> Tensor:
    return widened(logits_TV) / temperatures_T[:, None]


def _selected(scaled_TV: Tensor, targets_T: Tensor) -> Tensor:
    return scaled_TV.gather(-1, targets_T[:, None]).squeeze(-1) - torch.logsumexp(scaled_TV, dim=-1)


def _entropy(scaled_TV: Tensor) -> Tensor:
    normaliser_T = torch.logsumexp(scaled_TV, dim=-1)
    p_TV = (scaled_TV - normaliser_T[:, None]).exp()
    return normaliser_T - (p_TV * scaled_TV).sum(-1)
