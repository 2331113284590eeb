"""All ranks write a checkpoint together, in the background: each one its copy of its own states.

main threads  CopyStates ─▶ every rank's host memory                                   (the training waits)
background    directory ─▶ every rank's files, synced on its host ─▶ state.json, CURRENT on rank 0
"""

from dataclasses import dataclass
from pathlib import Path

from trainer_service.model.sharding.file_copies import StateCopy
from trainer_service.step.communication.rank_threads import RankThread, RankThreads
from trainer_service.storage.files import sync_tree

NO_COPY = StateCopy({})


@dataclass(frozen=True)
class SpreadCopy:
    """The copies of all ranks, of which rank 0 has its own."""

    own: StateCopy
    ranks: RankThreads[Path, None]

    def write(self, directory: Path) -> None:
        """Have every rank write its files. Returns when they are durable. Raises OSError if a rank's disk
        refuses, and RuntimeError if a rank failed otherwise, or is gone."""
        self.ranks.carry_out(directory.absolute(), lambda: _write(self.own, directory))


class CopyWriter:
    """The side of another rank: a thread that writes this rank's copy whenever rank 0 asks for it."""

    def __init__(self, ranks: int) -> None:
        self.copy = NO_COPY
        """The last copy. Rank 0 takes no further one before all have written it."""
        self._thread = RankThread[Path, None](ranks, "copy-writer", lambda path: _write(self.copy, path))

    def forget(self) -> None:
        """Free the last copy. To be called before the next one is taken, so that only one is in memory."""
        self.copy = NO_COPY

    def join(self) -> None:
        """Wait until rank 0 has ended this thread."""
        self._thread.join()


def _write(copy: StateCopy, directory: Path) -> None:
    copy.write(directory)
    directory.mkdir(parents=True, exist_ok=True)  # a copy without states has made none
    sync_tree(directory)  # rank 0 cannot sync what a rank on another host has written to a common disk
