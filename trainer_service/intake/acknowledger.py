"""Acknowledges entries and stores verdicts, in the order that a crash cannot disturb.

a group that ended without a step ─▶ end ─▶ stream, at once
a group that a step has trained ───▶ owe ─▶ (a checkpoint) ─ acknowledge_owed ─▶ stream
"""

import logging
from collections import deque
from collections.abc import Sequence

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.stream import StreamReader
from trainer_service.groups.acknowledgement import Acknowledgement
from trainer_service.metrics import TrainerMetrics
from trainer_service.status.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

RECENT = 8
"""How many of the last acknowledgements are kept, so that their verdicts can be stored again."""
GROUPS_AT_ONCE = 500
"""Groups in one transaction, during which Redis serves nobody else."""


class Acknowledger:
    """Owns what the stream has not been told yet."""

    def __init__(self, stream: StreamReader, heartbeat: Heartbeat, metrics: TrainerMetrics) -> None:
        self._stream, self._heartbeat, self._metrics = stream, heartbeat, metrics
        self._owed: list[Acknowledgement] = []
        self._recent: deque[Acknowledgement] = deque(maxlen=RECENT)
        """A Redis that lost its last writes in a power cut delivers their entries again."""

    @property
    def owed(self) -> Acknowledgement:
        """What the weights have trained and the stream has not been told."""
        return Acknowledgement.joined(self._owed)

    @property
    def owed_sessions(self) -> int:
        return sum(len(each.sessions) for each in self._owed)

    def resume(self, owed: Acknowledgement, pending: set[str]) -> None:
        """Acknowledge what a checkpoint contains. `pending` are the ids of the entries that the stream still
        has: where it has none of these, they were acknowledged and counted before the crash."""
        self._recent.append(owed)
        if pending.intersection(owed.entry_ids):
            self._owed = [owed]
            self.acknowledge_owed()

    def owe(self, acknowledgement: Acknowledgement) -> None:
        """The weights contain this now; it is acknowledged when a checkpoint contains it too."""
        self._owed.append(acknowledgement)

    def acknowledge_owed(self) -> None:
        """Acknowledge everything owed, in one transaction. A durable checkpoint must contain it. Raises
        Stopped."""
        if self._owed:
            self._acknowledge(self._owed)
            self._owed = []

    def end(self, ended: Sequence[Acknowledgement], freed: list[str], late: list[str]) -> None:
        """Acknowledge groups that no step will use. `freed` are the ids of entries that a deletion made
        useless, `late` those of entries that came after their session's end. Raises Stopped."""
        waiting = list(ended)
        if freed:  # before the deletion itself, which may be in one of these groups
            waiting.insert(0, Acknowledgement(freed, {}, []))
        if late:
            logger.info("%d entries came after their session had ended", len(late))
            # Together with what is owed, so that a crash cannot separate the entries of a session.
            (self._owed or waiting).append(Acknowledgement(late, {}, []))
            came = set(late)
            waiting += [each for each in self._recent if came.intersection(each.entry_ids)]
        for start in range(0, len(waiting), GROUPS_AT_ONCE):
            self._acknowledge(waiting[start : start + GROUPS_AT_ONCE])

    def _acknowledge(self, parts: Sequence[Acknowledgement]) -> None:
        whole = Acknowledgement.joined(parts)
        self._heartbeat.retry(
            lambda: self._stream.acknowledge(whole.entry_ids, whole.verdicts), StorageUnavailable, "waiting"
        )
        self._metrics.acknowledged(whole)
        if whole.sessions and whole not in self._recent:
            self._recent.append(whole)
