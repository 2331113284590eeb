"""All ranks write a version or a checkpoint together, in the background: each its share, or its own states.

a version     rank 0    publisher's thread  directory ─┬─▶ own files ──┬─▶ all files ─▶ index, manifest, …
              rank 1 …  a thread of its own ◀──────────┴─▶ their files ┘
a checkpoint  main threads  CopyStates ─▶ every rank's host memory                       (the training waits)
              background    directory ─▶ every rank's files, synced on its host ─▶ state.json, CURRENT
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from rollout_queue.contract.published_policy import FileSpec
from trainer_service.model.file_copies import StateCopy
from trainer_service.model.snapshot import FILE_BYTES, WeightSnapshot
from trainer_service.step.rank_communication import RankThread, RankThreads
from trainer_service.storage.durable_files import sync_tree

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


class WriteShare(NamedTuple):
    """Write the share of the last snapshot."""

    directory: Path
    file_bytes: int


class LookFor(NamedTuple):
    """Say whether this file exists, in a directory where this rank may write."""

    path: Path


class ShareWriters:
    """Rank 0's side: has every rank write its share. One thread at a time calls it."""

    def __init__(self, ranks: int) -> None:
        self._ranks = RankThreads[WriteShare | LookFor, bool | list[FileSpec]](ranks)

    def without(self, directory: Path) -> list[int]:
        """The ranks that do not see the files that rank 0 makes in `directory`, or may not write there."""
        directory.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=directory.absolute(), prefix=".rank-0-") as file:
            seen = self._ranks.carry_out(LookFor(Path(file.name)), lambda: True)
        return [rank for rank, sees in enumerate(seen) if not sees]

    def write(self, share: WeightSnapshot, directory: Path, file_bytes: int) -> list[FileSpec]:
        """Have every rank write its share into `directory`; `share` is rank 0's. Returns when no rank writes
        any more. Raises the OSError of a rank whose disk refuses, and RuntimeError if a rank is gone."""
        order = WriteShare(directory.absolute(), file_bytes)
        answers = self._ranks.carry_out(order, lambda: share.write_share(directory, file_bytes))
        return [spec for specs in answers if isinstance(specs, list) for spec in specs]

    def close(self) -> None:
        """End the threads of the other ranks."""
        self._ranks.close()


@dataclass(frozen=True)
class SpreadSnapshot(WeightSnapshot):
    """Rank 0's share of the weights. `write` has every rank write its own share."""

    writers: ShareWriters = field(kw_only=True)

    def write(self, directory: Path, file_bytes: int = FILE_BYTES) -> list[FileSpec]:
        return self.indexed(directory, self.writers.write(self, directory, file_bytes))


class ShareWriter:
    """The side of another rank: a thread that writes this rank's share whenever rank 0 asks for it."""

    def __init__(self, ranks: int) -> None:
        self.snapshot = WeightSnapshot([])
        """The last snapshot. Rank 0 asks for it only when all ranks have taken it, and takes no further one
        before all have written it."""
        self._thread = RankThread[WriteShare | LookFor, bool | list[FileSpec]](
            ranks, "share-writer", self._carry_out
        )

    def join(self) -> None:
        """Wait until rank 0 has ended this thread."""
        self._thread.join()

    def _carry_out(self, order: WriteShare | LookFor) -> bool | list[FileSpec]:
        match order:
            case LookFor(path):
                return os.access(path, os.F_OK) and os.access(path.parent, os.W_OK)
            case WriteShare(directory, file_bytes):
                return self._write(directory, file_bytes)

    def _write(self, directory: Path, file_bytes: int) -> list[FileSpec]:
        specs = self.snapshot.write_share(directory, file_bytes)
        for spec in specs:  # rank 0, on another host, can sync only what it wrote itself
            with (directory / spec.name).open("rb") as file:
                os.fsync(file.fileno())
        return specs
