"""Which groups of a batch have a gradient that is not finite: found by halves, without a step.

batch ─ not sound ─┬─ half ─ sound
                   └─ half ─ not sound ─┬─ …      down to the groups that are to blame
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from trainer_service.batch import MicroBatch, Row, micro_batches
from trainer_service.loss import policy_loss
from trainer_service.settings import AlgorithmSettings

Blamed = TypeVar("Blamed")


class Prober(Protocol):
    """What a probe needs of a policy: one rank's, which has all of the weights. Nothing of it is changed."""

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


def has_finite_gradient(
    prober: Prober,
    rows: Sequence[Row],
    tokens_in_step: int,
    algorithm: AlgorithmSettings,
    beat: Callable[[], None],
) -> bool:
    """Whether the rows' share of the loss of a step of that many tokens has a gradient that is finite."""
    norm = 0.0
    for batch in micro_batches(rows, algorithm.max_tokens):
        norm += prober.gradient_norm(batch, _loss(prober, batch, tokens_in_step, algorithm))
        beat()
        if not math.isfinite(norm):
            return False
    return True


def _loss(
    prober: Prober, batch: MicroBatch, tokens_in_step: int, algorithm: AlgorithmSettings
) -> Callable[[Tensor], Tensor]:
    def loss_of(lp_new_T: Tensor) -> Tensor:
        return policy_loss(
            lp_new_T,
            lp_new_T.detach(),
            prober.tensor(batch.logprobs_T),
            prober.tensor(batch.advantages_T),
            prober.tensor(batch.rows_T),
            tokens_in_step,
            algorithm,
        ).loss

    return loss_of
