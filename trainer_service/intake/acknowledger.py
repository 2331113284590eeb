"""Acknowledges entries and stores verdicts. After a crash, no entry is lost and none is trained twice.

a group that ended without a step ─▶ end ─▶ stream, at once
a group that a step has trained ───▶ owe ─▶ contain: a checkpoint ─ acknowledge_contained ─▶ stream
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.stream import StreamReader
from trainer_service.groups.acknowledgement import Acknowledgement
from trainer_service.heartbeat import Heartbeat
from trainer_service.metrics import TrainerMetrics

logger = logging.getLogger(__name__)

RECENT = 8
"""How many of the last acknowledgements are kept in memory."""
SESSIONS_AT_ONCE = 250
"""How many sessions the groups have at most that are acknowledged together, if they are several. The sessions
get their verdicts in one transaction, so that no group is ended in part."""


class Acknowledger:
    """Keeps the acknowledgements that wait for a checkpoint, and the last ones that were sent."""

    def __init__(self, stream: StreamReader, heartbeat: Heartbeat, metrics: TrainerMetrics) -> None:
        self._stream, self._heartbeat, self._metrics = stream, heartbeat, metrics
        self._owed: list[Acknowledgement] = []
        self._contained = 0
        """How many of them the checkpoint contains that was begun last."""
        self._recent: deque[Acknowledgement] = deque(maxlen=RECENT)
        """The acknowledgements that were sent last. If Redis loses its last writes in a power cut, it
        delivers the entries of these acknowledgements again. The trainer then repeats the acknowledgement."""

    @property
    def owed(self) -> Acknowledgement:
        """The entries and verdicts that were trained and are not acknowledged yet."""
        return Acknowledgement.joined(self._owed)

    @property
    def owed_sessions(self) -> int:
        return sum(len(each.sessions) for each in self._owed)

    def resume(self, owed: Acknowledgement, pending: set[str]) -> None:
        """Acknowledge the entries that a restored checkpoint contains. `pending` has the ids of all entries
        that are not acknowledged. If `owed` has none of the pending entries, the former process acknowledged
        and counted `owed` before it ended. Raises Stopped."""
        self._recent.append(owed)
        if pending.intersection(owed.entry_ids):
            self._owed = [owed]
            self.contain()
            self.acknowledge_contained()

    def owe(self, acknowledgement: Acknowledgement) -> None:
        """Keep an acknowledgement of a trained group until a checkpoint contains the group's step."""
        self._owed.append(acknowledgement)

    def contain(self) -> None:
        """Note that a checkpoint contains the steps of everything that is owed now."""
        self._contained = len(self._owed)

    def acknowledge_contained(self) -> None:
        """Acknowledge what the last checkpoint contains, which is durable. If the trainer ends meanwhile,
        the next one repeats it. Raises Stopped."""
        if self._contained:
            self._acknowledge(self._owed[: self._contained])
            self._owed, self._contained = self._owed[self._contained :], 0

    def end(self, ended: Sequence[Acknowledgement], freed: list[str], late: list[str]) -> None:
        """Acknowledge groups that no step will use. `freed` has the ids of entries that a deletion made
        useless, `late` the ids of entries that came after their session had ended. Raises Stopped."""
        waiting = list(ended)
        if freed:  # acknowledged before the deletion's own entry, which may be in one of these groups
            waiting.insert(0, Acknowledgement(freed, {}, []))
        if late:
            logger.info("%d entries came after their session had ended", len(late))
            # If entries are owed, the late ones are acknowledged after them: a crash must not leave some
            # entries of a session acknowledged and others not.
            (self._owed or waiting).append(Acknowledgement(late, {}, []))
            if self._contained == len(self._owed) - 1:  # all sessions that are owed
                self._contained += 1
            late_ids = set(late)
            waiting += [each for each in self._recent if late_ids.intersection(each.entry_ids)]
        self._acknowledge(waiting)

    def _acknowledge(self, parts: Sequence[Acknowledgement]) -> None:
        for number, some in enumerate(_at_once(parts)):
            if number:
                self._heartbeat.beat("waiting", "Redis to take the verdicts of many sessions")
            part = Acknowledgement.joined(some)
            self._heartbeat.retry(partial(self._send, part), StorageUnavailable, "waiting")
            self._metrics.acknowledged(part)
        whole = Acknowledgement.joined(parts)
        if whole.sessions and whole not in self._recent:
            self._recent.append(whole)

    def _send(self, part: Acknowledgement) -> None:
        self._stream.acknowledge(part.entry_ids, part.verdicts)


def _at_once(parts: Sequence[Acknowledgement]) -> Iterator[list[Acknowledgement]]:
    """The parts that are acknowledged together. What has no session stays with the part before it, so that
    entries come last."""
    some, sessions = list[Acknowledgement](), 0
    for part in parts:
        if some and part.sessions and sessions + len(part.sessions) > SESSIONS_AT_ONCE:
            yield some
            some, sessions = [], 0
        some.append(part)
        sessions += len(part.sessions)
    if some:
        yield some
