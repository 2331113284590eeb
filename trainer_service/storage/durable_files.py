"""Writes files that survive a power cut: under another name first, then synced and renamed. It lists files
with their digests, by which damage is noticed before they are read, and repeats a write that the disk
refuses.

Libraries report a disk that is full or failing in different ways: Python with an errno; safetensors with the
errno in its message; torch's zip writer with a message about a short write, and perhaps an errno in the
error's cause.
"""

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from rollout_queue.contract.published_policy import FileSpec, sha256_of
from rollout_queue.protocol.trainer_messages import ROOM_ON_DISK
from trainer_service.heartbeat import Heartbeat
from trainer_service.shared_state import Phase
from trainer_service.trainer_metrics import TrainerMetrics


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file's content. A crash leaves all of the old or all of the new one. Raises OSError."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock `directory` for this process. The kernel removes the lock when the process dies, however it dies.

    Raises SystemExit when another process has the lock: two trainers would write the same checkpoints.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another trainer runs on {directory}") from None
        yield


def sync_tree(directory: Path) -> None:
    """Make every file and name below `directory` durable."""
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FILES = "files.json"


class Damaged(Exception):
    """A file of the list is missing, or has another content. The message names it."""


def write_file_list(directory: Path) -> None:
    """List all files below `directory`. Raises OSError."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    specs = [
        FileSpec(path.relative_to(directory).as_posix(), path.stat().st_size, sha256_of(path))
        for path in paths
    ]
    (directory / FILES).write_bytes(msgspec.json.encode(specs))


def verify_file_list(directory: Path) -> None:
    """Raises Damaged."""
    try:
        specs = msgspec.json.decode((directory / FILES).read_bytes(), type=list[FileSpec])
    except (OSError, msgspec.DecodeError) as error:
        raise Damaged(f"{FILES}: {error}") from error
    for spec in specs:
        path = directory / spec.name
        try:
            same = path.stat().st_size == spec.size and sha256_of(path) == spec.sha256
        except OSError as error:
            raise Damaged(f"{spec.name}: {error}") from error
        if not same:
            raise Damaged(f"{spec.name} has another content than was written")


DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
ERRNO_IN_MESSAGE = re.compile(r"\(os error (\d+)\)")
TORCH_WRITER = re.compile(r"inline_container|PytorchStreamWriter|iostream error|write\(\): fd \d+ failed")
"""Messages of the RuntimeError that `torch.save` raises after a short write."""


class DiskRefused(Exception):
    """The disk refused a write, and the attempt left no files. The write can be repeated later."""


@contextmanager
def written(what: str, undo: Callable[[], None]) -> Iterator[None]:
    """If the disk refuses a write inside the block, calls `undo` and raises DiskRefused. Every other error
    passes unchanged."""
    try:
        yield
    except Exception as error:
        reason = disk_error(error)
        if reason is None:
            raise
        undo()
        raise DiskRefused(f"{what} could not be written: {reason}") from error


def disk_error(error: BaseException | None) -> str | None:
    """What is wrong with the disk, in words; None if the error has another cause."""
    short_write = None
    while error is not None:
        number = error.errno if isinstance(error, OSError) else _errno_in_message(error)
        if number in DISK_ERRNOS:
            return os.strerror(number)
        if isinstance(error, RuntimeError) and TORCH_WRITER.search(str(error)):
            short_write = f"a short write ({error})"
        error = error.__cause__ or error.__context__
    return short_write


def _errno_in_message(error: BaseException) -> int | None:
    found = ERRNO_IN_MESSAGE.search(str(error))
    return int(found[1]) if found else None


Written = TypeVar("Written")


class DiskRetry:
    """Repeats writes. While the main thread waits for one, nothing is trained, acknowledged or published."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        metrics: TrainerMetrics,
        phase: Phase,
        counted_as: Literal["checkpoint", "publish"],
    ) -> None:
        """Refused writes are counted in `weir_trainer_disk_refusals{what=counted_as}`."""
        self._heartbeat, self._metrics = heartbeat, metrics
        self._phase, self._counted_as = phase, counted_as

    def until_written(self, what: str, write: Callable[[], Written]) -> Written:
        """Repeat `write` until the disk accepts it; returns its result. While the trainer waits, its status
        names `what`. Raises Stopped when told to stop."""
        attempt, room = partial(self._attempt, write), f"{ROOM_ON_DISK} for {what}"
        return self._heartbeat.retry(attempt, DiskRefused, self._phase, room)

    def until_written_behind(
        self, what: str, write: Callable[[], Written], note: Callable[[str], None]
    ) -> Written:
        """As `until_written`, in another thread: `note` is called with what it waits for."""
        attempt, room = partial(self._attempt, write), f"{ROOM_ON_DISK} for {what}"
        return self._heartbeat.retry_quietly(attempt, DiskRefused, room, note)

    def _attempt(self, write: Callable[[], Written]) -> Written:
        try:
            return write()
        except DiskRefused:
            self._metrics.disk_refused(self._counted_as)
            raise
