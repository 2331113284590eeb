"""Distributes micro-batches over the ranks, and collects values from them.

ranks ─┬─ 0 1 ─▶ one micro-batch (with sequence_parallel 2)
       └─ 2 3 ─▶ another one
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trainer_service.model.sharding.sequence_ranks import SequenceRanks, sequence_ranks
from trainer_service.rows.rows import MicroBatch, balanced_shares

Value = TypeVar("Value")


@dataclass(frozen=True)
class Parallel:
    """The place of this rank among all."""

    rank: int
    ranks: int
    sequence: SequenceRanks | None
    """The ranks that compute each micro-batch together; None if each computes its own."""

    @classmethod
    def joined(cls, sequence_parallel: int) -> "Parallel":
        """Every rank must call it, after it has joined the process group."""
        distributed = torch.distributed
        return cls(distributed.get_rank(), distributed.get_world_size(), sequence_ranks(sequence_parallel))

    @property
    def _of_batch(self) -> int:
        return self.sequence.size if self.sequence else 1

    @property
    def data_ranks(self) -> int:
        """How many micro-batches are computed at the same time."""
        return self.ranks // self._of_batch

    def own_share(self, batches: Sequence[MicroBatch], even_at: float) -> list[tuple[MicroBatch, bool]]:
        """This rank's share of the micro-batches, the costliest first. Ranks reduce their gradients together,
        so all need the same number of passes. False marks a micro-batch that is added only for this. In a
        row of `even_at` tokens, attention costs as much as everything else."""
        costs = [batch.cost(even_at) for batch in batches]
        shares = balanced_shares(costs, self.data_ranks)
        own = [(batches[index], True) for index in shares[self.rank // self._of_batch]]
        cheapest = batches[costs.index(min(costs))]
        return own + [(cheapest, False)] * (max(map(len, shares)) - len(own))

    def all_gather(self, values: list[Value]) -> list[Value]:
        """The values of all ranks, in the order of ranks, on every rank. Ranks that compute a micro-batch
        together have the same values; they count once. The values must be on the CPU."""
        if self.ranks == 1:
            return values
        gathered: list[list[Value]] = [[]] * self.ranks
        counts = self.sequence is None or self.sequence.index == 0
        torch.distributed.all_gather_object(gathered, values if counts else [])
        return [value for part in gathered for value in part]

    def agree(self, mine: bool, device: torch.device) -> bool:
        """Whether it is true on all ranks. Every rank must call it."""
        return bool(self.mean(torch.tensor(float(mine), device=device)) == 1)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks, the same on all of them; finite if every rank's value is."""
        if self.ranks > 1:
            torch.distributed.all_reduce(value)
        return value / self.ranks
