"""Reads entries from the stream, and waits while Redis does not answer."""

import logging
from collections.abc import Iterable

from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.stream import Entry, StreamReader
from trainer_service.groups.assemble import Assembler
from trainer_service.intake.finished_earlier import read_finished
from trainer_service.status.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

READ_COUNT = 1000
BLOCK_S = 0.25
"""How long a read waits for new entries, if those that are here do not make a step."""


class EntryReader:
    """Reads the stream, and knows whether all of it is read."""

    def __init__(self, stream: StreamReader, heartbeat: Heartbeat) -> None:
        self._stream, self._heartbeat = stream, heartbeat
        self._read_at = clock.monotonic()
        self.caught_up = False
        """Whether the last read returned all entries that were waiting."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last new entry."""
        return clock.monotonic() - self._read_at

    def reclaim(self) -> list[Entry]:
        """Every entry that was delivered to a trainer and not acknowledged. Raises Stopped."""
        return self._heartbeat.retry(lambda: list(self._stream.reclaim()), StorageUnavailable, "waiting")

    def read_into(self, assembler: Assembler, block_s: float) -> None:
        """Read new entries, and add them to the assembler. Waits at most `block_s` for the first. Raises
        Stopped."""
        try:
            entries = list(self._stream.read(READ_COUNT, block_s))
            self.caught_up = len(entries) < READ_COUNT
        except StorageUnavailable as error:
            logger.warning("%s", error)
            # If only the answer was lost, its entries count as delivered, and only a reclaim returns them.
            entries = self.reclaim()
            self.caught_up = False
        self.add(entries, assembler)
        if entries:
            self._read_at = clock.monotonic()

    def add(self, entries: Iterable[Entry], assembler: Assembler) -> None:
        """Add entries to the assembler, and tell it which of their sessions and groups an earlier process has
        finished. That process may have finished some after its last checkpoint. Raises Stopped."""
        assembler.add(entries)
        sessions, groups = assembler.take_new_ids()
        if sessions or groups:
            finished = self._heartbeat.retry(
                lambda: read_finished(self._stream, sessions, groups), StorageUnavailable, "waiting"
            )
            assembler.mark_finished(finished.settled, finished.gone)
