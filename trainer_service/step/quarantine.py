"""Which groups of a batch have a gradient that is not finite: found by halves, without a step.

batch ─ not sound ─┬─ half ─ sound
                   └─ half ─ not sound ─┬─ …      down to the groups that are to blame
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from trainer_service.algorithms.aggregation import StepCounts
from trainer_service.algorithms.policy_loss import policy_loss
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.step import step_statistics
from trainer_service.algorithms.tokens import Tokens
from trainer_service.rows.rows import MicroBatch, micro_batches
from trainer_service.step.optimizer_step import counts_of
from trainer_service.step.step_request import StepRequest

Blamed = TypeVar("Blamed")


class Prober(Protocol):
    """What a probe needs of a policy: one rank's, while every other rank makes the same probe. Nothing of it
    is changed."""

    def gradient_norm(self, batch: MicroBatch, loss_of: Callable[[Tensor], Tensor]) -> float: ...

    def tensor(self, values: Any) -> Tensor: ...


def culprits(groups: Sequence[Blamed], sound: Callable[[Sequence[Blamed]], bool]) -> list[Blamed]:
    """The groups to blame: all of them where none is alone, none where together they are sound."""
    if sound(groups):
        return []
    if len(groups) == 1:
        return list(groups)
    middle = len(groups) // 2
    return culprits(groups[:middle], sound) + culprits(groups[middle:], sound) or list(groups)


def has_finite_gradient(prober: Prober, request: StepRequest) -> bool:
    """Whether the loss of this step has a gradient that is finite: the same on every rank."""
    norm, counts, algorithm = 0.0, counts_of(request.rows), request.algorithm
    for batch in micro_batches(request.rows, algorithm.max_tokens):
        norm += prober.gradient_norm(batch, _loss(prober, batch, counts, algorithm))
        request.beat()
        if not math.isfinite(norm):
            return False
    return True


def _loss(
    prober: Prober, batch: MicroBatch, counts: StepCounts, algorithm: AlgorithmSettings
) -> Callable[[Tensor], Tensor]:
    """Other policies stand where the learning one does: what they say has no gradient. Tokens that get their
    advantage from the whole step have one of 1."""

    def loss_of(lp_new_T: Tensor) -> Tensor:
        own_T = lp_new_T.detach()
        advantages_T = prober.tensor(batch.advantages_T)
        tokens = Tokens(
            lp_new_T=lp_new_T,
            lp_prox_T=own_T,
            lp_roll_T=prober.tensor(batch.logprobs_T),
            advantages_T=torch.ones_like(own_T) if algorithm.credits_tokens else advantages_T,
            rows_T=prober.tensor(batch.rows_T),
            lp_ref_T=own_T,
            lp_teacher_T=own_T,
            entropy_T=torch.zeros_like(own_T),
        )
        return policy_loss(tokens, algorithm, counts, step_statistics(tokens, algorithm)).loss

    return loss_of
