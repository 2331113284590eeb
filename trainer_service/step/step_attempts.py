"""Finds groups that end the trainer's process, and rows that are too long for the memory.

Groups are noted before they are computed. A process that finds the note of an earlier one knows that the
earlier one ended meanwhile, and how many times that has happened with each group.

once            the groups are trained like others: somebody may have stopped the process
twice           micro-batches have half as many tokens from now on, and each group is first tried alone
twice, alone    the group is not trained

If a rank says at its end that an allocation failed, micro-batches are halved after the first end. A single
rank need not end: it tries what fits.

a pass ─ OutOfMemory ─┬─ it had several rows ─▶ smaller micro-batches
                      └─ it had one row ─ first_too_long ─▶ a bound of the length of rows
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from rollout_queue.contract.errors import LeaseLost
from rollout_queue.contract.records import Verdict
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.screening import ScreenedGroup, with_verdict
from trainer_service.heartbeat import Stopped
from trainer_service.storage.run_state import AttemptFile, AttemptNote, OutOfMemoryMark

logger = logging.getLogger(__name__)


class Sized(Protocol):
    """Something with a length in tokens."""

    def __len__(self) -> int: ...


Measured = TypeVar("Measured", bound=Sized)
FAILED_ALLOCATIONS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""What torch's messages contain if an allocation has failed on CPU, in the CUDA runtime or in cuBLAS."""


class OutOfMemory(Exception):
    """A pass did not fit into the memory. The weights are unchanged, and no gradient is accumulated."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation has failed. Only torch's own allocator for CUDA has an exception for that."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in FAILED_ALLOCATIONS)


def first_too_long(rows: Sequence[Measured], fits: Callable[[Measured], bool]) -> Measured | None:
    """The shortest of these rows that does not fit, by bisection. None if the longest one fits."""
    rows = sorted(rows, key=len)
    if fits(rows[-1]):
        return None
    low, high = 0, len(rows) - 1  # those before `low` fit; the one at `high` does not
    while low < high:
        middle = (low + high) // 2
        if fits(rows[middle]):
            low = middle + 1
        else:
            high = middle
    return rows[high]


MOST_ENDS = 2
"""How many times a group may be there when the process ends, together with others and then alone."""
DETAIL = f"the process has ended {MOST_ENDS} times while it computed this group's gradient alone"
MOST_HALVINGS = 30
"""After so many, a micro-batch of any size has one row."""
TRIES, MANY_TRIES = 5, 20
"""How often a row is tried that does not fit, with growing pauses, before rows of its length are too long."""
REMEMBERED = 1000
"""How many groups are remembered that were there when a process ended."""


class StepAttempts:
    """The groups that are computed now, and those that were when earlier processes ended."""

    def __init__(self, file: AttemptFile, mark: OutOfMemoryMark) -> None:
        self._file, self._mark, self._note = file, mark, AttemptNote()

    @classmethod
    def beside(cls, checkpoint_dir: Path) -> "StepAttempts":
        """Those that files beside the checkpoints note."""
        return cls(AttemptFile(checkpoint_dir), OutOfMemoryMark(checkpoint_dir))

    def resume(self) -> None:
        """Count the end of the last process. Call this once, when a process starts."""
        note = self._note = self._file.read()
        out_of_memory = self._mark.take()
        if not note.computes:
            return
        counts = note.alone_ends if note.alone else note.ends
        for name in note.computes:
            counts[name] = counts.get(name, 0) + 1
        logger.warning("the last process ended while it computed the groups %s", ", ".join(note.computes))
        if not note.alone and (out_of_memory or MOST_ENDS in (counts[name] for name in note.computes)):
            self.halve()
        while len(note.ends) > REMEMBERED:
            del note.ends[next(iter(note.ends))]
        self._compute_nothing()

    def eased(self, algorithm: AlgorithmSettings) -> AlgorithmSettings:
        """The algorithm, with smaller micro-batches and without long rows, if passes did not fit into the
        memory or have ended processes."""
        note, eased = self._note, {}
        if note.halvings:
            eased["max_tokens"] = max(1, algorithm.micro_batch_tokens >> note.halvings)
        if note.row_tokens is not None:
            eased["max_row_tokens"] = min(note.row_tokens, algorithm.max_row_tokens or note.row_tokens)
        return algorithm.model_copy(update=eased) if eased else algorithm

    def halve(self) -> None:
        """Micro-batches have half as many tokens from now on."""
        self._note.halvings = min(self._note.halvings + 1, MOST_HALVINGS)
        logger.warning("micro-batches have %d times fewer tokens from now on", 2**self._note.halvings)
        self._file.write(self._note)

    def bound_rows(self, tokens: int) -> None:
        """Rows of more tokens are not trained from now on."""
        self._note.row_tokens = tokens
        logger.warning("rows of more than %d tokens are not trained from now on", tokens)
        self._file.write(self._note)

    def note_trained(self, row_tokens: int) -> None:
        """A step was made, whose longest row had so many tokens."""
        self._note.trained_row_tokens = max(self._note.trained_row_tokens, row_tokens)

    def tries(self, row_tokens: int) -> int:
        """How often a row of this length is tried before it is too long: more often if one was trained, as
        somebody else may use the memory for a while."""
        return MANY_TRIES if row_tokens <= self._note.trained_row_tokens else TRIES

    def refused(
        self, groups: Sequence[ScreenedGroup], attempt: Callable[[ScreenedGroup], object]
    ) -> list[ScreenedGroup]:
        """The groups that end the process, with their verdict. Calls `attempt` for each group under
        suspicion, which may end the process."""
        found = []
        for screened in groups:
            name = screened.group.name
            if self._note.ends.get(name, 0) < MOST_ENDS:
                continue
            if self._note.alone_ends.get(name, 0) >= MOST_ENDS:
                found.append(with_verdict(screened, Verdict(code="invalid", detail=DETAIL)))
                self._forget([name])
            else:
                with self.noted([screened], alone=True):
                    attempt(screened)
        return found

    @contextmanager
    def noted(self, groups: Sequence[ScreenedGroup], alone: bool = False) -> Iterator[None]:
        """Note these groups while they are computed. If that ends well, no suspicion is left."""
        names = [screened.group.name for screened in groups]
        self._note.computes, self._note.alone = names, alone
        self._file.write(self._note)
        try:
            yield
        except (Stopped, LeaseLost):  # the process ends for another reason than what it computes
            self._compute_nothing()
            raise
        self._forget(names)

    def _forget(self, names: Sequence[str]) -> None:
        note = self._note
        for name in names:
            note.ends.pop(name, None)
            note.alone_ends.pop(name, None)
        self._compute_nothing()

    def _compute_nothing(self) -> None:
        self._note.computes, self._note.alone = [], False
        self._file.write(self._note)
