"""Finds groups that end the trainer's process, for instance because a row does not fit into the memory.

Groups are noted before they are computed. A process that finds the note of an earlier one knows that the
earlier one ended meanwhile, and how many times that has happened with each group.

once            the groups are trained like others: somebody may have stopped the process
twice           micro-batches have half as many tokens from now on, and each group is first tried alone
twice, alone    the group is not trained

The end of a rank that says that its memory was used up counts twice. A single rank need not end: `ease`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollout_queue.contract.errors import LeaseLost
from rollout_queue.contract.records import Verdict
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.screening import ScreenedGroup, with_verdict
from trainer_service.status.heartbeat import Stopped
from trainer_service.step.memory_limit import OutOfMemory
from trainer_service.storage.run_files import AttemptFile, AttemptNote, OutOfMemoryMark

logger = logging.getLogger(__name__)

MOST_ENDS = 2
"""How many times a group may be there when the process ends, together with others and then alone."""
DETAIL = "the process has ended while it computed this group's gradient alone: twice, or without memory"
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
        ends = MOST_ENDS if self._mark.take() else 1  # a rank without memory is no accident
        if not note.computes:
            return
        counts = note.alone_ends if note.alone else note.ends
        for name in note.computes:
            counts[name] = counts.get(name, 0) + ends
        logger.warning("the last process ended while it computed the groups %s", ", ".join(note.computes))
        reached = range(MOST_ENDS, MOST_ENDS + ends)  # counts that were below MOST_ENDS before
        if not note.alone and any(counts[name] in reached for name in note.computes):
            self._halve()
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

    def ease(self, micro_batch_tokens: int, row_tokens: int | None) -> None:
        """A pass did not fit into the memory: train no rows of more than `row_tokens`. If that is None, halve
        the micro-batches, which had at most `micro_batch_tokens`. Raises OutOfMemory if nothing is left to
        make smaller."""
        if row_tokens is None and micro_batch_tokens == 1:
            raise OutOfMemory("even the shortest pass does not fit into the memory")
        if row_tokens is None:
            self._halve()
        else:
            self._note.row_tokens = row_tokens
            logger.warning("rows of more than %d tokens are not trained from now on", row_tokens)
        self._file.write(self._note)

    def _halve(self) -> None:
        self._note.halvings += 1
        logger.warning("micro-batches have %d times fewer tokens from now on", 2**self._note.halvings)

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
        except (Stopped, LeaseLost, OutOfMemory):  # the process does not end, or not because of these groups
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
