"""Reads entries from the stream, and waits while Redis does not answer. It finds the sessions and groups that
an earlier trainer process has finished, by their verdicts in Redis.

    ids of new sessions and groups ─▶ read_finished ─▶ FinishedEarlier(settled, gone)

A checkpoint also stores the sessions and groups that were finished before it. But a group that ends without a
step gets its verdicts between two checkpoints, and the process may end before it writes the next checkpoint.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.export_rows import CLOSING
from rollout_queue.contract.stream import Entry, GroupMembers
from rollout_queue.redis.stream_reader import StreamReader
from trainer_service.groups.assemble import Assembler
from trainer_service.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

GIVEN_BY_GATEWAYS = frozenset({*CLOSING, "deleted"})
"""Verdicts that gateways give. A session with one of them counts in its group until the trainer ends the
group."""


class FinishedEarlier(NamedTuple):
    """The ids of finished sessions and groups."""

    settled: frozenset[str]
    """Sessions that have a verdict of the trainer."""
    gone: frozenset[str]
    """Groups that have ended, perhaps without some of their members."""


def read_finished(
    stream: StreamReader, session_ids: Collection[str], group_ids: Collection[str]
) -> FinishedEarlier:
    """Which of these sessions and groups are finished. Sessions and groups that Redis does not know count as
    new. Raises StorageUnavailable."""
    groups = stream.group_members(group_ids)
    asked = (each.members for each in groups.values() if each.size is not None and not each.forgotten)
    codes = stream.verdict_codes({*session_ids}.union(*asked))
    settled = frozenset(each for each in session_ids if _is_settled(codes.get(each)))
    gone = frozenset(group_id for group_id, group in groups.items() if _is_gone(group, codes))
    return FinishedEarlier(settled, gone)


def _is_settled(code: str | None) -> bool:
    return code is not None and code not in GIVEN_BY_GATEWAYS


def _is_gone(group: GroupMembers, codes: Mapping[str, str]) -> bool:
    """Whether the group has ended. There are three cases: one member has a verdict of the trainer, which ends
    groups as a whole; all members have verdicts; or Redis has removed members some time after their verdicts
    (`forgotten`). A group without a size is never gone: it ends when it gets no record for
    long, and begins again with its next record."""
    if group.size is None:
        return False
    if group.forgotten:
        return True
    ended = [codes[member] for member in group.members if member in codes]
    return any(_is_settled(code) for code in ended) or len(ended) == group.size


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
            read = partial(read_finished, self._stream, sessions, groups)
            finished = self._heartbeat.retry(read, StorageUnavailable, "waiting")
            assembler.mark_finished(finished.settled, finished.gone)
