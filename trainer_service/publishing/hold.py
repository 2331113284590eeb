"""Holds the training when a guard raises an alarm, until an operator resumes it.

    alarm ─▶ pause ─ HELD on disk ─ (roll the fleet back) ─▶ … POST /resume … ─▶ publish the newest version

The step of the alarm is undone before (recovery.py), so what is published after the hold is not what raised
the alarm. Meanwhile the fleet goes on with the version that it serves, or goes back to an older version with
better rewards.
"""

import logging
from collections.abc import Callable

from trainer_service.groups.reward_guard import Alarm
from trainer_service.groups.version_scores import VersionScore, VersionScores
from trainer_service.publishing.publisher import Publisher
from trainer_service.publishing.recovery import choice_of
from trainer_service.settings import TrainerSettings
from trainer_service.status.shared_state import SharedState
from trainer_service.storage.disk_retry import DiskRetry
from trainer_service.storage.run_files import HoldFile, HoldNote

logger = logging.getLogger(__name__)


class Hold:
    """Knows why the training is held. The reason is also on disk, so that a restarted trainer stays held."""

    def __init__(
        self,
        settings: TrainerSettings,
        publisher: Publisher,
        scores: VersionScores,
        disk: DiskRetry,
        shared_state: SharedState,
    ) -> None:
        self._settings, self._publisher, self._scores = settings, publisher, scores
        self._disk, self._shared_state = disk, shared_state
        self._file = HoldFile(settings.checkpoint_dir)
        self.reason: str | None = None
        """Why a guard holds the training. None if no guard holds it; an operator may still have paused it."""

    def take_over(self, version: int) -> HoldNote | None:
        """Pause the training if an earlier process held it. Returns what is still to be undone, if that
        process ended before a checkpoint had the restored weights; the last one is of this version."""
        if (note := self._file.read()) is None:
            return None
        self.reason = note.alarm.reason
        self._shared_state.pause()
        return note if version <= note.version else None

    def hold(self, alarm: Alarm, version: int) -> None:
        """Hold the training. The weights of this version are about to be undone. May raise Stopped."""
        logger.error("paused: %s", alarm.reason)
        self.reason = alarm.reason
        self._shared_state.pause()
        note = HoldNote(alarm, version)
        self._disk.until_written("the reason of a pause", lambda: self._file.write(note))
        if self._settings.guards.roll_back:
            self._roll_back(alarm)

    def forget(self) -> None:
        """The reason is no longer there. The training stays paused."""
        self.reason = None
        self._file.remove()

    def release(self, publish_newest: Callable[[], None]) -> None:
        """End the hold: an operator has resumed the training. Publishes the newest version, even if the fleet
        serves an older one with better rewards."""
        publish_newest()
        self.forget()

    def rollback_target(self, alarm: Alarm | None = None) -> VersionScore | None:
        """The version with the best rewards, for the task of the alarm, among those that can be served again;
        None if none has a score."""
        task = (None, None) if alarm is None else (alarm.task_id, alarm.source)
        return self._scores.best({self._settings.initial_version, *self._publisher.versions()}, *task)

    def _roll_back(self, alarm: Alarm) -> None:
        best = self.rollback_target(alarm)
        if best is not None and self._publisher.roll_back(best.version):
            choice = choice_of(best)
            logger.warning("%s, and is served", choice)
            self.reason = f"{alarm.reason}; {choice}, and is served"
