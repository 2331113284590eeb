"""All ranks write a version together: each one the tensors that its snapshot keeps.

rank 0    publisher's thread   directory ─┬─▶ own files ──┬─▶ what all ranks wrote ─▶ index, manifest, STABLE
rank 1 …  a thread of its own  ◀──────────┴─▶ their files ┘

These threads have process groups of their own, because the main threads may be in a collective of the
training meanwhile. If a rank dies, its connections break: rank 0's thread raises, and the trainer ends.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import NamedTuple, TypeVar

import torch

from rollout_queue.contract.policies.policy import FileSpec
from trainer_service.model.snapshot import FILE_BYTES, WeightSnapshot
from trainer_service.step.command_channel import CommandChannel

logger = logging.getLogger(__name__)

LONGEST_SHARE = timedelta(minutes=30)
"""How long rank 0 waits for the other ranks after its own share, which has as many bytes, is written."""
Result = TypeVar("Result")


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
        self._orders = CommandChannel[WriteShare | LookFor](ranks)
        self._answers = _Answers(ranks)

    def without(self, directory: Path) -> list[int]:
        """The ranks that do not see the files that rank 0 makes in `directory`, or may not write there."""
        directory.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=directory.absolute(), prefix=".rank-0-") as file:
            self._orders.send(LookFor(Path(file.name)))
            seen = self._answers.gather(True)
        return [rank for rank, sees in enumerate(seen) if not sees]

    def write(self, share: WeightSnapshot, directory: Path, file_bytes: int) -> list[FileSpec]:
        """Have every rank write its share into `directory`; `share` is rank 0's. Returns when no rank writes
        any more. Raises the OSError of a rank whose disk refuses, and RuntimeError if a rank is gone."""
        self._orders.send(WriteShare(directory.absolute(), file_bytes))
        specs: list[FileSpec] = []
        for answer in self._answers.gather(_attempt(lambda: share.write_share(directory, file_bytes))):
            if isinstance(answer, Exception):
                raise answer
            specs += answer
        return specs

    def close(self) -> None:
        """End the threads of the other ranks."""
        self._orders.send(None)


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
        self._orders = CommandChannel[WriteShare | LookFor](ranks)
        self._answers = _Answers(ranks)
        # A daemon, because it cannot be told to end if rank 0 is gone.
        self._thread = Thread(target=self._carry_out, name="share-writer", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until rank 0 has ended this thread."""
        self._thread.join()

    def _carry_out(self) -> None:
        while (order := self._orders.receive()) is not None:
            match order:
                case LookFor(path):
                    self._answers.gather(os.access(path, os.F_OK) and os.access(path.parent, os.W_OK))
                case WriteShare(directory, file_bytes):
                    self._answers.gather(_attempt(lambda: self._write(directory, file_bytes)))

    def _write(self, directory: Path, file_bytes: int) -> list[FileSpec]:
        specs = self.snapshot.write_share(directory, file_bytes)
        for spec in specs:  # rank 0, on another host, can sync only what it wrote itself
            with (directory / spec.name).open("rb") as file:
                os.fsync(file.fileno())
        return specs


def _attempt(write: Callable[[], list[FileSpec]]) -> list[FileSpec] | Exception:
    """What `write` returns or raises, in a form that travels to rank 0."""
    try:
        return write()
    except OSError as error:
        logger.warning("this rank could not write its share of a version: %s", error)
        return error
    except Exception as error:
        logger.exception("this rank could not write its share of a version")
        return RuntimeError(f"a rank could not write its share of a version: {error!r}")


class _Answers:
    """Brings one value from each rank to rank 0."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._group = (
            torch.distributed.new_group(backend="gloo", timeout=LONGEST_SHARE) if ranks > 1 else None
        )

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks on rank 0, and nothing on the others. Raises RuntimeError if a rank is gone
        or takes too long."""
        if self._group is None:
            return [value]
        on_rank_0 = torch.distributed.get_rank() == 0
        values: list[Result] | None = [value] * self._ranks if on_rank_0 else None
        try:
            torch.distributed.gather_object(value, values, dst=0, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(f"a rank is gone, or had no answer for {LONGEST_SHARE}") from error
        return values or []
