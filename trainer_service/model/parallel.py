"""Distributes micro-batches over the ranks, and collects values from them.

ranks ─┬─ 0 1 ─▶ one micro-batch (with sequence_parallel 2): each has a part of every row, then of the heads
       └─ 2 3 ─▶ another one

Sequence parallelism: W ranks compute one micro-batch together, each a slice of its N tokens.

    MicroBatch ─ slice_of ─▶ own N/W tokens ─ every layer but attention ─▶ …
    attention: own tokens, all heads ─ join ─▶ all tokens, own heads ─ attend ─ part ─▶ own tokens, all heads
    log p of own tokens ─ whole ─▶ log p of all tokens, on every rank

So they need 1/W of the memory of activations, and attention over long rows is shared, too (DeepSpeed Ulysses,
arXiv:2309.14509). Each rank computes the loss of the whole micro-batch; the gradients of the ranks are parts
of its gradient, and their sum is the whole.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer_service.rows.rows import Floats, Ints, MicroBatch, TopTokens, balanced_shares


@dataclass(frozen=True)
class Slice:
    """One rank's tokens of a micro-batch, and the trained tokens that they predict."""

    ids_N: Ints
    positions_N: Ints
    predict_at_T: Ints
    targets_T: Ints
    temperatures_T: Floats
    at_T: Ints
    """The numbers of these trained tokens in the micro-batch. If there are none, the other fields have one
    token all the same, so that the pass reaches every weight."""
    teacher_top: TopTokens | None


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that compute a micro-batch together, and this one among them."""

    size: int
    index: int
    group: Any
    """Their process group."""

    def padding(self, tokens: int) -> int:
        """How many tokens follow a pack so that all slices are equal. They are a row of their own."""
        return -tokens % self.size

    def slice_of(self, batch: MicroBatch) -> Slice:
        padding = self.padding(len(batch.ids_N))
        ids_N = np.concatenate([batch.ids_N, np.zeros(padding, np.int64)])
        positions_N = np.concatenate([batch.positions_N, np.arange(padding)])
        length = len(ids_N) // self.size
        start = self.index * length
        at_T = np.flatnonzero((start <= batch.predict_at_T) & (batch.predict_at_T < start + length))
        some = len(at_T) > 0
        return Slice(
            ids_N=ids_N[start : start + length],
            positions_N=positions_N[start : start + length],
            predict_at_T=batch.predict_at_T[at_T] - start if some else np.zeros(1, np.int64),
            targets_T=batch.targets_T[at_T] if some else np.zeros(1, np.int64),
            temperatures_T=batch.temperatures_T[at_T] if some else np.ones(1, np.float32),
            at_T=at_T,
            teacher_top=batch.teacher_top.at(at_T if some else np.zeros(1, np.int64))
            if batch.teacher_top
            else None,
        )

    def whole(self, own_TX: Tensor, part: Slice, tokens: int) -> Tensor:
        """The values [T, X] of all trained tokens, from those that the slices predict. Every rank gets the
        gradient of its own."""
        at_T = torch.from_numpy(part.at_T).to(own_TX.device)
        whole: Tensor = _Whole.apply(own_TX[: len(at_T)], at_T, tokens, self.group)  # type: ignore[no-untyped-call]
        return whole if len(at_T) else whole + 0 * own_TX.sum()

    def join(self, heads: Tensor) -> Tensor:
        """All tokens of this rank's heads [B, heads/W, N, D], from its tokens of all heads
        [B, heads, N/W, D]. Heads of keys and values that are fewer than the ranks are repeated."""
        if heads.shape[1] < self.size:
            heads = heads.repeat_interleave(self.size // heads.shape[1], dim=1)
        joined: Tensor = _Exchange.apply(heads, 1, 2, self)  # type: ignore[no-untyped-call]
        return joined

    def part(self, attended: Tensor) -> Tensor:
        """This rank's tokens of all heads [B, N/W, heads, D], from all tokens of its heads
        [B, N, heads/W, D]."""
        parted: Tensor = _Exchange.apply(attended, 1, 2, self)  # type: ignore[no-untyped-call]
        return parted

    def own_heads(self, values_H: Tensor) -> Tensor:
        """Of one value for each head, those of this rank's heads."""
        return values_H.chunk(self.size)[self.index]


def sequence_ranks(size: int) -> SequenceRanks | None:
    """This rank's group, of `size` consecutive ranks; None for groups of one. Every rank must call it. Raises
    SystemExit if the number of ranks is no multiple of `size`."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if ranks % size:
        raise SystemExit(f"trainer.sequence_parallel: {size} does not divide the number of ranks, {ranks}")
    if size == 1:
        return None
    groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
    own = [torch.distributed.new_group(group) for group in groups][rank // size]
    return SequenceRanks(size, rank % size, own)


def check_heads(config: Any, size: int) -> None:
    """Raises SystemExit if the heads of this configuration cannot be shared among `size` ranks."""
    heads = config.num_attention_heads
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or (of_keys % size and size % of_keys):
        raise SystemExit(
            f"trainer.sequence_parallel: {size} ranks cannot share {heads} heads with {of_keys} heads of keys"
        )


class _Exchange(torch.autograd.Function):
    """Cuts dimension `cut` over the ranks, and joins their parts along dimension `join`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: int, join: int, ranks: SequenceRanks) -> Tensor:
        ctx.way = cut, join, ranks
        sent = torch.stack([part.contiguous() for part in own.chunk(ranks.size, cut)])
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=ranks.group)
        return torch.cat(received.unbind(0), join)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cut, join, ranks = ctx.way
        own = _Exchange.apply(gradients[0], join, cut, ranks)  # type: ignore[no-untyped-call]
        return own, None, None, None


class _Whole(torch.autograd.Function):
    """Puts the values of all ranks into one tensor."""

    @staticmethod
    def forward(ctx: Any, own_TX: Tensor, at_T: Tensor, tokens: int, group: Any) -> Tensor:
        ctx.save_for_backward(at_T)
        whole_TX = own_TX.new_zeros(tokens, own_TX.shape[1])
        whole_TX[at_T] = own_TX
        torch.distributed.all_reduce(whole_TX, group=group)
        return whole_TX

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (at_T,) = ctx.saved_tensors
        return gradients[0][at_T], None, None, None


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
        so all need the same number of passes. False marks a micro-batch that is added only for this.
        `even_at` is that of `MicroBatch.cost`."""
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


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, object]:
    """The states of all generators, by library, in the form that a checkpoint stores."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states that `random_states` returned. Without CUDA, the state of CUDA is ignored."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if isinstance(states["cuda"], torch.Tensor) and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
