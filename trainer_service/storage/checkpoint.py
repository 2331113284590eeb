"""Saves weights, optimizer, random generators, version and trained entries together, or not at all.

    {directory}/00000007-step-00000003/   DeepSpeed's shards, model/ in the Hugging Face layout, adapter/ of a
                                          LoRA, and state.json with the sizes of all these files
    {directory}/00000000-step-00000000/   the same of the weights before the first step, without any position
    {directory}/ledger.jsonl              one line per trained step; state.json says how much of it counts
    {directory}/CURRENT                   the tag that a restart loads; replaced last, atomically

DeepSpeed's own file `latest` is not crash safe: it is written without sync, before all shards are written. So
each checkpoint has its own tag, and CURRENT is replaced when everything is on disk.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from trainer_service.model.checkpoint_layout import Layout, LayoutRefused, remove_converted
from trainer_service.storage.durable_files import sync_directory, sync_tree, write_atomically, written
from trainer_service.storage.run_state import LedgerStep, RunState

logger = logging.getLogger(__name__)

CURRENT = "CURRENT"
STATE = "state.json"
LEDGER = "ledger.jsonl"
INITIAL = f"{0:08d}-step-{0:08d}"
TAG = re.compile(r"(\d{8,})-step-\d{8,}")
"""The names of checkpoints. A volume may have other directories, such as lost+found."""


Wanted = Callable[[Collection[int]], set[int]]
"""Of the versions that have a checkpoint, those whose checkpoints must stay."""


class CheckpointBroken(Exception):
    """The checkpoint that CURRENT names is incomplete, or may not be durable. The trainer does not load
    another one by itself."""


class WrittenLater(Protocol):
    """The states of all ranks in host memory, until the next copy is taken."""

    def write(self, directory: Path) -> None: ...


class ShardedWeights(Protocol):
    """Copies and reads the shards of the weights."""

    @property
    def layout(self) -> Layout: ...

    def copy_states(self) -> WrittenLater: ...

    def load(self, directory: Path, tag: str, layout: Layout | None, rate_scale: float = 1.0) -> None: ...


class Unwritten(NamedTuple):
    """A checkpoint in memory."""

    tag: str
    weights: WrittenLater
    state: RunState
    steps: Sequence[LedgerStep]
    """The steps since the last checkpoint."""
    kept: set[int]
    """The versions whose checkpoints must stay."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, keep: int, executor: Executor | None = None) -> None:
        """`executor` writes checkpoints in the background; by default, one thread."""
        self.executor = executor or ThreadPoolExecutor(1, "checkpoint")
        self._directory = directory
        self._keep = keep
        self._ledger_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)

    def take_over(self, weights: ShardedWeights) -> None:
        """Look, before anything is written, whether these weights can go on with the run in the directory.
        Raises LayoutRefused if its last checkpoint is of another one. Before the first step, nothing was
        made of the first version, and that of another run is removed."""
        tag = self._current() or INITIAL
        layout = None
        with suppress(CheckpointBroken):  # `restore` says so
            layout = self._read(tag).layout
        try:
            if layout is not None:
                layout.refuse_other_run(weights.layout)
        except LayoutRefused:
            if tag != INITIAL:
                raise
            shutil.rmtree(self._directory / tag)

    def copied(
        self,
        weights: ShardedWeights,
        state: RunState,
        steps: Sequence[LedgerStep],
        wanted: Wanted | None = None,
    ) -> Unwritten:
        """Copy everything that a checkpoint contains. `steps` are the steps since the last checkpoint. The
        former copy must be written. The checkpoints of the versions that are `wanted` of all stay."""
        serial = 1 + max((int(tag.split("-")[0]) for tag in self._tags()), default=0)
        tag = f"{serial:08d}-step-{state.step:08d}"
        kept = wanted({*self.versions(), state.version}) if wanted else set()
        state = msgspec.structs.replace(state, layout=weights.layout)
        return Unwritten(tag, weights.copy_states(), state, steps, kept)

    def copied_initial(self, weights: ShardedWeights, version: int) -> Unwritten:
        """Copy the weights before the first step, which have this version."""
        return Unwritten(
            INITIAL, weights.copy_states(), RunState(version=version, layout=weights.layout), (), set()
        )

    def write_initial(self, unwritten: Unwritten, confirm: Callable[[], None]) -> None:
        """Write a durable checkpoint that no restart loads by itself. Touches nothing else in the directory,
        which another thread may read. May raise as `write` does."""
        shards = self._directory / unwritten.tag

        def remove() -> None:
            shutil.rmtree(shards, ignore_errors=True)

        remove()  # what a former process has left
        with written("the checkpoint of the first version", remove):
            unwritten.weights.write(shards)
            self._finish(unwritten, 0, confirm)

    def write(self, unwritten: Unwritten, confirm: Callable[[], None] = lambda: None) -> str:
        """Write a durable checkpoint; returns its tag. Then remove old checkpoints. `confirm` is called
        when the shards are written, and may raise.

        Another thread may call it, and again after DiskRefused. Raises DiskRefused if the disk refuses.
        CURRENT is unchanged then, and the attempt leaves no files.
        """
        tag = unwritten.tag
        self._sweep()
        with written(f"checkpoint {tag}", lambda: self._undo(tag)):
            unwritten.weights.write(self._directory / tag)
            ledger_bytes = self._append(unwritten.steps)
            self._finish(unwritten, ledger_bytes, confirm)
            write_atomically(self._directory / CURRENT, tag.encode())
        self._ledger_bytes = ledger_bytes
        self._prune(tag, unwritten.kept)
        return tag

    def _finish(self, unwritten: Unwritten, ledger_bytes: int, confirm: Callable[[], None]) -> None:
        """Write the state beside the shards, and make all durable."""
        shards = self._directory / unwritten.tag
        files = {
            path.relative_to(shards).as_posix(): path.stat().st_size
            for path in sorted(shards.rglob("*"))
            if path.is_file()
        }
        whole = msgspec.structs.replace(unwritten.state, files=files, ledger_bytes=ledger_bytes)
        confirm()
        (shards / STATE).write_bytes(msgspec.json.encode(whole))
        sync_tree(shards)
        sync_directory(self._directory)

    def _undo(self, tag: str) -> None:
        """Remove the files of a failed attempt. Raises CheckpointBroken if CURRENT was replaced and only its
        sync failed. After a power cut, CURRENT might then name the old or the new checkpoint. So both are
        kept, and a restart loads the one that it names."""
        if self._current() == tag:
            raise CheckpointBroken(f"checkpoint {tag} may not be durable: {CURRENT} could not be synced")
        shutil.rmtree(self._directory / tag, ignore_errors=True)
        with suppress(OSError):
            os.truncate(self._directory / LEDGER, self._ledger_bytes)

    def _sweep(self) -> None:
        """Remove checkpoints without STATE. STATE is written last, so these checkpoints are not complete."""
        remove_converted(self._directory)
        for tag in self._tags():
            if not (self._directory / tag / STATE).exists():
                shutil.rmtree(self._directory / tag, ignore_errors=True)

    def restore(self, weights: ShardedWeights) -> RunState | None:
        """Load the checkpoint that CURRENT names; None if there is none. Raises CheckpointBroken."""
        tag = self._current()
        if tag is None:
            if tags := set(self._tags()) - {INITIAL}:
                logger.warning(
                    "%d checkpoints without CURRENT in %s: none was finished", len(tags), self._directory
                )
            return None
        state = self._read(tag)
        weights.load(self._directory, tag, state.layout, state.recovery.rate_scale)
        self._ledger_bytes = state.ledger_bytes
        logger.info("restored step %d, version %d from checkpoint %s", state.step, state.version, tag)
        return state

    def versions(self) -> dict[int, str]:
        """The versions whose weights and optimizer can be restored, and the tags of their checkpoints."""
        found = {}
        for tag in self._tags():
            with suppress(OSError, msgspec.DecodeError):
                state = (self._directory / tag / STATE).read_bytes()
                found[msgspec.json.decode(state, type=_VersionOf).version] = tag
        return found

    def load(self, weights: ShardedWeights, version: int, rate_scale: float) -> None:
        """Load weights, optimizer and schedule of a version, and nothing else of its checkpoint. Raises
        CheckpointBroken."""
        tag = self.versions().get(version)
        if tag is None:
            raise CheckpointBroken(f"no checkpoint has version {version}")
        weights.load(self._directory, tag, self._read(tag).layout, rate_scale)

    def ledger(self, since: int, limit: int) -> list[LedgerStep]:
        """Up to `limit` steps after step `since` that a durable checkpoint contains, oldest first."""
        rows: list[LedgerStep] = []
        for row in self._rows():
            if row.step > since:
                rows.append(row)
            if len(rows) == limit:
                break
        return rows

    def _rows(self) -> Iterator[LedgerStep]:
        path = self._directory / LEDGER
        left = self._ledger_bytes
        if not path.exists():
            return
        with path.open("rb") as file:
            for line in file:
                left -= len(line)
                if left < 0:
                    return
                yield msgspec.json.decode(line, type=LedgerStep)

    def _append(self, steps: Sequence[LedgerStep]) -> int:
        """Append steps to the ledger; returns its length in bytes. Lines beyond the durable length are cut
        off first: they are from an attempt that did not replace CURRENT."""
        path = self._directory / LEDGER
        path.touch()
        with path.open("r+b") as file:
            file.truncate(self._ledger_bytes)
            file.seek(self._ledger_bytes)
            file.writelines(msgspec.json.encode(row) + b"\n" for row in steps)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def _read(self, tag: str) -> RunState:
        directory = self._directory / tag
        try:
            state = msgspec.json.decode((directory / STATE).read_bytes(), type=RunState)
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointBroken(f"checkpoint {tag}: {error}") from error
        for name, size in state.files.items():
            path = directory / name
            if not path.is_file() or path.stat().st_size != size:
                raise CheckpointBroken(f"checkpoint {tag}: {name} is missing or does not have {size} bytes")
        ledger = self._directory / LEDGER
        if state.ledger_bytes > (ledger.stat().st_size if ledger.exists() else 0):
            raise CheckpointBroken(f"checkpoint {tag}: {LEDGER} is shorter than it was")
        return state

    def _current(self) -> str | None:
        """The tag that a restart loads; None before the first checkpoint."""
        current = self._directory / CURRENT
        return current.read_text(encoding="utf-8").strip() if current.exists() else None

    def _tags(self) -> list[str]:
        return sorted(p.name for p in self._directory.iterdir() if p.is_dir() and TAG.fullmatch(p.name))

    def _prune(self, current: str, wanted: set[int]) -> None:
        versions = self.versions()
        kept = {current, *self._tags()[-self._keep :], *(versions[each] for each in wanted & set(versions))}
        for tag in self._tags():
            if tag not in kept:
                shutil.rmtree(self._directory / tag)


class _VersionOf(msgspec.Struct, frozen=True):
    """The version alone, of a state."""

    version: int
