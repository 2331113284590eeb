"""The load of a mixture's experts: metrics from sums over the tokens of a step."""

import torch
from torch import Tensor

from trainer_service.algorithms.sums import Sums

LOAD, PROBABILITY = "router/load/", "router/probability/"
"""How the vectors [E] of a layer are named: how often each of its experts was chosen, and the sum of each
expert's probability over the tokens."""


def router_metrics(step: Sums) -> dict[str, float]:
    """The load of the experts of a mixture, by the metrics' names; empty for other models.

    `router/aux_loss` is the auxiliary loss of Switch Transformers (2101.03961) as transformers computes it:
    E times the scalar product of two vectors over the experts, the mean number of times that a token chose
    an expert, and the mean probability. Both means are over the tokens of all layers. It is K, the number of
    experts of a token, if either vector is uniform."""
    loads = [vector for name, vector in step.vectors.items() if name.startswith(LOAD)]
    if not loads:
        return {}
    probability_E = torch.stack([step.vectors[name] for name in step.vectors if name.startswith(PROBABILITY)])
    return {
        "router/load_max": max(float(each.max() / each.mean()) for each in loads),
        "router/load_zero": sum(float((each == 0).double().mean()) for each in loads) / len(loads),
        "router/aux_loss": float(len(loads[0]) * (mean_load(step) @ probability_E.sum(0))),
    }


def mean_load(step: Sums) -> Tensor:
    """[E] float64: how often each expert was chosen, divided by the square of the number of tokens, each of
    which counts once a layer. The auxiliary loss is E times the scalar product of this vector and the sum of
    the experts' probabilities."""
    loads = torch.stack([vector for name, vector in step.vectors.items() if name.startswith(LOAD)])
    return loads.sum(0) / step.counts["router/entropy"] ** 2
