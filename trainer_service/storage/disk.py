"""Recognises errors of a disk that is full or failing, and repeats a write until the disk accepts it.

Libraries report them in different ways: Python with an errno; safetensors with the errno in its message;
torch's zip writer with a message about a short write, and perhaps an errno in the error's cause.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from rollout_queue.protocol.trainer_messages import ROOM_ON_DISK
from trainer_service.heartbeat import Heartbeat
from trainer_service.metrics import TrainerMetrics
from trainer_service.shared_state import Phase

TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
TOLD_ERRNO = re.compile(r"\(os error (\d+)\)")
TORCH_WRITER = re.compile(r"inline_container|PytorchStreamWriter|iostream error|write\(\): fd \d+ failed")
"""Messages of the RuntimeError that `torch.save` raises after a short write."""


class DiskTrouble(Exception):
    """The disk refused a write, and the attempt left no files. The write can be repeated later."""


@contextmanager
def written(what: str, undo: Callable[[], None]) -> Iterator[None]:
    """If the disk refuses a write inside the block, calls `undo` and raises DiskTrouble. Every other error
    passes unchanged."""
    try:
        yield
    except Exception as error:
        reason = trouble(error)
        if reason is None:
            raise
        undo()
        raise DiskTrouble(f"{what} could not be written: {reason}") from error


def trouble(error: BaseException | None) -> str | None:
    """What is wrong with the disk, in words; None if the error has another cause."""
    short_write = None
    while error is not None:
        number = error.errno if isinstance(error, OSError) else _told_errno(error)
        if number in TROUBLE:
            return os.strerror(number)
        if isinstance(error, RuntimeError) and TORCH_WRITER.search(str(error)):
            short_write = f"a short write ({error})"
        error = error.__cause__ or error.__context__
    return short_write


def _told_errno(error: BaseException) -> int | None:
    told = TOLD_ERRNO.search(str(error))
    return int(told[1]) if told else None


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
        return self._heartbeat.retry(self._counted(write), DiskTrouble, self._phase, _room_for(what))

    def until_written_behind(
        self, what: str, write: Callable[[], Written], note: Callable[[str], None]
    ) -> Written:
        """As `until_written`, in another thread: `note` is called with what it waits for."""
        return self._heartbeat.retry_quietly(self._counted(write), DiskTrouble, _room_for(what), note)

    def _counted(self, write: Callable[[], Written]) -> Callable[[], Written]:
        def counted() -> Written:
            try:
                return write()
            except DiskTrouble:
                self._metrics.disk_refused(self._counted_as)
                raise

        return counted


def _room_for(what: str) -> str:
    return f"{ROOM_ON_DISK} for {what}"
