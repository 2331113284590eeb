"""Ends the sessions of agents that a trainer by commands does not train, so that the stream does not grow."""

from collections.abc import Sequence

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import Outcome, Turn, Verdict
from rollout_queue.contract.stream import Entry, StreamReader, Verdicts
from rollout_queue.contract.verdicts import exclusion
from trainer_service.status.heartbeat import Heartbeat

NOT_BY_TURNS = Verdict(
    code="not_for_training", detail="the trainer learns from commands, and not from turns (trainer.source)"
)
COUNT = 200
"""How many entries are read at once."""


class UntrainedTurns:
    """Reads the entries of agents' sessions, and acknowledges each with its verdict."""

    def __init__(self, stream: StreamReader, heartbeat: Heartbeat) -> None:
        self._stream, self._heartbeat = stream, heartbeat
        self._reclaims = True
        """Whether entries may have been delivered and not acknowledged."""

    def settle(self) -> None:
        """Acknowledge the entries that are there now. Raises Stopped, LeaseLost."""
        self._heartbeat.retry(self._settle, StorageUnavailable, "waiting")

    def _settle(self) -> None:
        if self._reclaims:
            self._acknowledge([*self._stream.reclaim()])
            self._reclaims = False
        try:
            while entries := self._stream.read(COUNT, 0):
                self._acknowledge(entries)
        except StorageUnavailable:
            self._reclaims = True
            raise

    def _acknowledge(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        records = [entry.record for entry in entries]
        ended = [record.session_id for record in records if isinstance(record, Outcome)]
        decided = self._stream.verdict_codes(ended)
        sessions = {name: NOT_BY_TURNS for name in ended if name not in decided}
        turns = {
            (record.session_id, record.turn_id): exclusion(record, {}) or NOT_BY_TURNS
            for record in records
            if isinstance(record, Turn)
        }
        self._stream.acknowledge([entry.entry_id for entry in entries], Verdicts(sessions, turns))
