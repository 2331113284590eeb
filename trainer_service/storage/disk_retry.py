"""Repeats a write until the disk accepts it."""

from collections.abc import Callable
from typing import Literal, TypeVar

from rollout_queue.protocol.trainer import ROOM_ON_DISK
from trainer_service.metrics import TrainerMetrics
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.status.shared_state import Phase
from trainer_service.storage.disk import DiskTrouble

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
