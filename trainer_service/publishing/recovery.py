"""Sets the training back to an earlier checkpoint when it has gone wrong, or holds it.

    alarm of a guard, or POST /rollback
        └─▶ weights, optimizer and schedule of the best checkpoint, with a lower learning rate
              └─▶ a new version number ─▶ a checkpoint with the present position ─▶ publish, or hold
    hold ─▶ pause ─ HELD on disk ─ (roll the fleet back) ─▶ … POST /resume … ─▶ publish the newest version

What was trained since stays trained: its entries are acknowledged, and its steps stay in the ledger. What was
sampled by the versions since, and waits, ends as stale. So no token is trained twice, whenever the process
dies: before the new checkpoint the old one is restored, and the same groups come again.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from math import nan

from msgspec.structs import replace

from rollout_queue import clock
from trainer_service.groups.group_rewards import GroupRewards, VersionScore, VersionScores
from trainer_service.groups.guards import Guards, Recovery, RecoveryState
from trainer_service.groups.reward_guard import Alarm
from trainer_service.publishing.publisher import Publisher
from trainer_service.settings import TrainerSettings
from trainer_service.shared_state import NotRestorable, SharedState
from trainer_service.storage.durable_files import DiskRetry
from trainer_service.storage.run_state import HoldFile, HoldNote, RunState
from trainer_service.trainer_metrics import TrainerMetrics

logger = logging.getLogger(__name__)

RECOVERIES_KEPT = 100
SOURCES_HELD = 3
"""For so many sources of tasks, those whose sessions ended last, the best checkpoint stays."""


class Recoveries:
    """Asks the guards, decides to where the training is set back, and remembers it."""

    def __init__(self, settings: TrainerSettings, rewards: GroupRewards, metrics: TrainerMetrics) -> None:
        self._settings, self._rewards, self._metrics = settings.guards, rewards, metrics
        self._initial_version = settings.initial_version
        self._guards = Guards(settings.guards)
        self.state = RecoveryState()
        self.suspects = False
        """Whether the weights are those of an alarm on which nothing was done yet."""

    def resume(self, state: RunState) -> None:
        """Continue with what a checkpoint stored."""
        self._guards.resume(state.guards)
        self._rewards.resume(state.scores, state.counted)
        self.state = state.recovery

    def stored_in(self, state: RunState) -> RunState:
        """The state of a checkpoint, with what guards and recoveries need."""
        return replace(
            state,
            guards=self._guards.state,
            scores=self._rewards.by_version.state,
            counted=self._rewards.counted,
            recovery=self.state,
        )

    def check_rewards(self) -> Alarm | None:
        """The alarm that the groups and evaluation sessions since the last call raise."""
        return self._counted(self._guards.check_rewards(*self._rewards.take()))

    def check_step(self, values: Mapping[str, float]) -> Alarm | None:
        """The alarm that a step raises, whose metrics these are."""
        return self._counted(self._guards.check_step(values))

    @property
    def used_up(self) -> bool:
        """Whether guards have set the training back so often that the next alarm holds it."""
        return self.state.automatic >= self._settings.max_recoveries

    def target(self, alarm: Alarm, restorable: Collection[int]) -> VersionScore | None:
        """The version that an alarm sets the training back to: the best of these for the task of the alarm,
        or the newest if none has a score. None if there are none."""
        best = self._rewards.by_version.best(restorable, alarm.task_id, alarm.source)
        return best or (VersionScore(max(restorable), 0, nan) if restorable else None)

    def wanted(self, restorable: Collection[int]) -> set[int]:
        """Of these versions, those whose checkpoints are worth keeping: the first, the best, also for each of
        the SOURCES_HELD last sources, and the oldest newer one that has no score yet, and may become the
        best."""
        scores = self._rewards.by_version
        best = scores.best(restorable)
        held = [scores.best(restorable, source=source) for source in scores.last_sources[-SOURCES_HELD:]]
        unscored = [
            version
            for version in restorable
            if not scores.knows(version) and (best is None or version > best.version)
        ]
        kept = {each.version for each in (best, *held) if each is not None}
        return {self._initial_version, *kept, *sorted(unscored)[:1]}

    @property
    def next_rate_scale(self) -> float:
        """The scale of the learning rate after the next recovery."""
        return self.state.rate_scale * self._settings.recovery_lr_factor

    def note(self, recovery: Recovery) -> None:
        """The weights are those of an older version now."""
        logger.error("the training went back to version %d: %s", recovery.restored, recovery.reason)
        self._metrics.recovered(recovery.automatic)
        self.settle()
        self.state = RecoveryState(
            self.next_rate_scale,
            [*self.state.done, recovery][-RECOVERIES_KEPT:],
            self.state.automatic + recovery.automatic,
        )

    def settle(self) -> None:
        """What was to be done about an alarm is done. Guards begin anew."""
        self._guards.forget_rewards()
        self.suspects = False

    def _counted(self, alarm: Alarm | None) -> Alarm | None:
        if alarm is not None:
            self.suspects = True
            self._metrics.alarmed(alarm.guard)
        return alarm


def check_restorable(version: int, restorable: Collection[int]) -> None:
    """Raises NotRestorable for a version that has no checkpoint."""
    if version not in restorable:
        known = ", ".join(map(str, sorted(restorable))) or "none"
        raise NotRestorable(f"no checkpoint has version {version}; these have one: {known}")


def choice_of(target: VersionScore) -> str:
    """Why the training goes back to this version, as a sentence without a full stop."""
    if not target.sessions:
        return f"version {target.version} is the newest that has a checkpoint"
    return f"version {target.version} did best, {target.reward:.3g} in {target.sessions} sessions"


def recovery_to(restored: int, version: int, step: int, reason: str, *, automatic: bool) -> Recovery:
    """A recovery that happens now."""
    return Recovery(version, restored, step, reason, automatic, clock.now())


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
