"""The loop: turns in, weights out.

    read ─▶ assemble ─▶ advantage ─▶ batch ─▶ loss ─▶ step ─▶ checkpoint ─▶ acknowledge ─▶ publish
     ▲                                         │ not full yet                              │
     └─────────────────────────────────────────┴───────────────────────────────────────────┘

An entry is acknowledged when a durable checkpoint contains the step that used it, or when it ended with a
verdict that no step can change. So whenever this process dies, the stream and the checkpoint together say
what is left to do.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.comparison import Baselines, remembered, scored
from trainer_service.groups.evaluation import EvaluationState
from trainer_service.groups.settlement import ScreenedGroup, without
from trainer_service.groups.tally import Tally
from trainer_service.groups.version_scores import VersionScore
from trainer_service.guards import Alarm, Guards
from trainer_service.intake import BLOCK_S, Intake
from trainer_service.metrics import TrainerMetrics
from trainer_service.publishing.publisher import Publisher
from trainer_service.rows.rows import Row
from trainer_service.settings import TrainerSettings
from trainer_service.status.heartbeat import Heartbeat, Stopped
from trainer_service.status.shared_state import Phase, SharedState
from trainer_service.status.stopwatch import Stopwatch
from trainer_service.step.early_groups import EarlyGroups
from trainer_service.step.quarantine import non_finite_groups
from trainer_service.step.ranks import Leader
from trainer_service.step.step_request import StepRequest
from trainer_service.step.teacher import TeacherClient, TeacherUnavailable
from trainer_service.storage.checkpoint import Checkpoints, LedgerStep, RunState
from trainer_service.storage.disk import DiskTrouble

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Diverged(Exception):
    """The weights are spoilt. Nothing of the step was saved; a restart goes back to the checkpoint."""


class Trainer:
    """Owns the policy and the stream, on the main thread; speaks to the HTTP thread through SharedState."""

    def __init__(
        self,
        settings: TrainerSettings,
        policy: Leader,
        intake: Intake,
        checkpoints: Checkpoints,
        publisher: Publisher,
        metrics: TrainerMetrics,
        shared_state: SharedState,
        heartbeat: Heartbeat,
        teacher: TeacherClient | None = None,
    ) -> None:
        self._settings = settings
        self._policy, self._intake = policy, intake
        self._checkpoints, self._publisher = checkpoints, publisher
        self._metrics, self._shared_state, self._heartbeat = metrics, shared_state, heartbeat
        self._teacher = teacher
        self.step, self.version = 0, settings.initial_version
        self._baselines: Baselines = {}
        self._saved_evaluations = EvaluationState()
        self._undurable: list[LedgerStep] = []
        self._watch = Stopwatch()
        self._guards = Guards(settings.guards)
        self._early_groups = EarlyGroups(policy)
        self._withheld = False
        """Whether the newest version waits for a resume before anybody serves it, or serves it again."""

    def run(self) -> None:
        """Train until told to stop, and leave everything that was trained in a checkpoint."""
        try:
            self.start()
            while not self._shared_state.stopping:
                self.run_once()
            self._save()
        except Stopped:
            logger.info("stopped while waiting; the next start takes up what is left")
            with suppress(Stopped):
                if self._undurable:
                    self._checkpoint()

    def start(self) -> None:
        """Take up where the last checkpoint left, and what was read since and not acknowledged."""
        state = self._checkpoints.restore(self._policy) or RunState(version=self._settings.initial_version)
        self.step, self.version = state.step, state.version
        self._baselines = state.baselines
        self._saved_evaluations = state.evaluations
        self._metrics.resume(self.step)
        self._heartbeat.note(self.step, self.version)
        self._say("waiting")
        self._intake.resume(state)
        self._shared_state.ready = True
        if reason := self._checkpoints.held():
            self._withheld = True
            self._shared_state.pause(reason)
        elif self.step and self._due(self._settings.publish_every_steps):
            self._publisher.resume(self.version, self.step, self._policy.export)

    def run_once(self) -> bool:
        """One turn of the loop. Returns whether it made a step."""
        self._grant_wishes()
        self._metrics.paused(self._shared_state.paused)
        if self._shared_state.paused:
            self._say("paused")
            self._shared_state.sleep(BLOCK_S)
            return False
        if self._withheld:
            self._release()
        with self._watch.timed("read"):
            self._intake.read()
            algorithm = self._settings.algorithm.after(self._shared_state.snapshot.metrics)
            batch = self._intake.batch(self.version, algorithm, self._early_groups.group_ids)
        if alarm := self._guards.check_rewards(self._intake.rewards()):
            self._hold(alarm)
            return False
        if not batch.full:
            self._learn_early(batch.groups, algorithm)
            self._say("waiting")
            return False
        values = self._train(batch.groups, algorithm)
        if values is None:
            return False
        if self._due(self._settings.checkpoint_every_steps):
            self._checkpoint()
        # Before it is published, which may wait for a gateway: what was trained leaves Redis first.
        if not self._undurable:
            with self._watch.timed("acknowledge"):
                self._intake.acknowledge()
        try:
            if alarm := self._guards.check_step({"step": self.step, **values}):
                self._hold(alarm)
            elif self._due(self._settings.publish_every_steps):
                self._publish()
        finally:  # it may be told to stop while the gateway is away
            self._log(values)
        return True

    def _learn_early(self, groups: Sequence[ScreenedGroup], algorithm: AlgorithmSettings) -> None:
        """Use the time in which a step waits for more groups, once those that are here fill a pass."""
        if not algorithm.learns_early:
            return
        self._early_groups.drop_if_changed(groups)
        remaining = self._early_groups.remaining(groups)
        rows = self._scored(remaining)
        if self._early_groups.fills_a_pass(rows, algorithm):
            with self._watch.timed("train"):
                self._say("training")
                self._early_groups.learn(remaining, self._request(rows, algorithm))

    def _train(self, batch: list[ScreenedGroup], algorithm: AlgorithmSettings) -> dict[str, float] | None:
        """Rows, loss, step. From here on the weights contain these groups; None when none could be made."""
        batch, rows = self._taught(batch)
        if not rows:
            return None
        rollouts = [rollout for judged in batch for rollout in judged.rollouts]
        # Before the step: between the weights and their number, nothing may fail.
        version = self._number()
        with self._watch.timed("train"):
            self._say("training")
            values = self._early_groups.step(batch, self._request(rows, algorithm))
        if not math.isfinite(values["grad_norm"]):
            self._quarantine(batch, values)
            return None
        self.step += 1
        self.version = version
        self._baselines = remembered(rollouts, self._settings.algorithm, self._baselines)
        self._heartbeat.note(self.step, self.version)
        self._intake.owe(batch, self.step, self.version)
        row = LedgerStep(
            step=self.step,
            version=self.version,
            durable=True,
            turns=[turn_id for row in rows for turn_id in row.turn_ids],
            sessions=sorted({row.session_id for row in rows}),
            tokens=sum(row.trained_tokens for row in rows),
        )
        self._undurable.append(row)
        values |= self._intake.tally.values(rows)
        self._intake.tally = Tally()
        return values

    def _request(self, rows: Sequence[Row], algorithm: AlgorithmSettings) -> StepRequest:
        return StepRequest(rows, self.version, algorithm, self._beat_training)

    def _scored(self, groups: Sequence[ScreenedGroup]) -> list[Row]:
        rows = [row for judged in groups for row in judged.rows]
        rollouts = [rollout for judged in groups for rollout in judged.rollouts]
        return scored(rows, rollouts, self._settings.algorithm, self._baselines)

    def _taught(self, batch: list[ScreenedGroup]) -> tuple[list[ScreenedGroup], list[Row]]:
        """The groups of the step and their rows, with what a teacher says of them where one judges. Sessions
        that it refuses end; the others of their group are trained without them."""
        rows, teacher = self._scored(batch), self._teacher
        if teacher is None:
            return batch, rows
        found = self._heartbeat.retry(
            lambda: teacher.score(rows), TeacherUnavailable, "waiting", "the teacher to judge the rows"
        )
        parted = [without(judged, found.refused) for judged in batch]
        self._intake.end([judged for judged in parted if judged.silence])
        return [judged for judged in parted if not judged.silence], found.rows

    def _number(self) -> int:
        """The version that the next step makes, and nobody else. May wait for the gateway, the disk or the
        stream: Stopped."""
        number = self._beyond(self._publisher.newest_version(self.version))
        while (newest := self._publisher.reserve(number)) >= number:
            number = self._beyond(newest)
        return number

    def _beyond(self, newest: int) -> int:
        return self._with_room("the number of a version", lambda: self._checkpoints.reserve(newest))

    def _quarantine(self, batch: list[ScreenedGroup], values: dict[str, float]) -> None:
        """End the groups whose gradient is not finite, so that no restart meets them again. Raises Diverged
        where the weights are spoilt: before these groups, or by an epoch before the one that failed."""
        step, norm, spoilt = self.step + 1, values["grad_norm"], not self._policy.weights_are_finite()
        if spoilt and not values["epochs"]:
            raise Diverged(f"step {step}: the weights are not finite")

        def sound(groups: Sequence[ScreenedGroup]) -> bool:
            return self._policy.gradient_is_finite(
                self._request(self._scored(groups), self._settings.algorithm)
            )

        found = [] if spoilt else non_finite_groups(batch, sound)
        whose = "its gradient" if found else f"the gradient of its batch of {len(batch)} groups"
        self._intake.refuse(found or batch, f"{whose} is not finite at version {self.version}")
        if values["epochs"]:
            raise Diverged(f"step {step}, epoch {values['epochs'] + 1:g}: the gradient's norm is {norm}")

    def _checkpoint(self) -> None:
        with self._watch.timed("checkpoint"):
            state = RunState(
                step=self.step,
                version=self.version,
                owed=self._intake.owed,
                settled=self._intake.settled,
                gone=self._intake.gone,
                evaluations=self._intake.evaluations.kept,
                baselines=dict(self._baselines),
            )
            self._with_room("a checkpoint", lambda: self._save_as(state))
        self._undurable = []
        self._saved_evaluations = state.evaluations

    def _save_as(self, state: RunState) -> None:
        self._heartbeat.confirm()
        self._checkpoints.save(self._policy, state, self._undurable)

    def _with_room(self, what: str, write: Callable[[], Result]) -> Result:
        """Write as soon as the disk takes it. Nothing is trained or acknowledged meanwhile."""

        def counted() -> Result:
            try:
                return write()
            except DiskTrouble:
                self._metrics.disk_refused("checkpoint")
                raise

        return self._heartbeat.retry(counted, DiskTrouble, "waiting", f"room on the disk for {what}")

    def _hold(self, alarm: Alarm) -> None:
        """Pause until somebody resumes, over restarts too, and have the fleet serve what did best. Raises
        Stopped."""
        logger.error("paused: %s", alarm.reason)
        self._metrics.alarmed(alarm.guard)
        self._withheld = True
        self._shared_state.pause(alarm.reason)
        self._with_room("the reason of a pause", lambda: self._checkpoints.hold(alarm.reason))
        best = self._best() if self._settings.guards.roll_back else None
        if best is not None and self._publisher.roll_back(best.version):
            said = f"version {best.version} did best, {best.reward:.3g} in {best.sessions} sessions"
            logger.warning("%s: it is served", said)
            self._shared_state.explain(f"{alarm.reason}; {said}, and is served")

    def _release(self) -> None:
        """Somebody resumed what was held: the newest version is served, whatever was served meanwhile."""
        if self.step:
            self._publish()
        self._withheld = False
        self._checkpoints.release()

    def _best(self) -> VersionScore | None:
        """Of the versions that can be served."""
        return self._intake.version_scores.best({self._settings.initial_version, *self._publisher.versions()})

    def _publish(self) -> None:
        self._heartbeat.confirm()
        with self._watch.timed("publish"):
            self._say("publishing")
            best = self._best()
            self._publisher.publish(
                self.version, self.step, self._policy.export, best=best.version if best else None
            )

    def _grant_wishes(self) -> None:
        if wishes := self._shared_state.take_checkpoint_requests():
            self._save(always=True)
            self._say("waiting")
            for wish in wishes:
                if wish.set_running_or_notify_cancel():  # else nobody waits for the answer any more
                    wish.set_result(self._shared_state.snapshot)

    def _save(self, always: bool = False) -> None:
        """A checkpoint of what is new, and the acknowledgement that it allows."""
        if self._undurable or always or self._intake.evaluations.kept != self._saved_evaluations:
            self._checkpoint()
        self._intake.acknowledge()

    def _due(self, every_steps: int) -> bool:
        return self.step % every_steps == 0

    def _say(self, phase: Phase) -> None:
        sentence = self._intake.waiting_for() if phase == "waiting" else None
        if sentence and self._early_groups.tokens:
            sentence = f"{sentence}; {self._early_groups.tokens} tokens are learned from already"
        if phase == "paused" and self._shared_state.paused_for:
            sentence = f"POST /resume, since {self._shared_state.paused_for}"
        if self._shared_state.ready:
            self._heartbeat.note_backlog(self._intake.backlog)
        self._heartbeat.beat(phase, sentence)

    def _beat_training(self) -> None:
        self._heartbeat.beat("training")

    def _log(self, values: dict[str, float]) -> None:
        place = {"step": self.step, "version": self.version, "time": time.time()}
        values = {**place, **values, **self._watch.laps(values["tokens"])}
        self._metrics.stepped(values)
        self._heartbeat.note(self.step, self.version, values)
        logger.info(
            "step %d made version %d: reward %.3f, %d rows, %d tokens, |dlogprob| %.2g, gradient %.3g",
            self.step,
            self.version,
            values["reward_mean"],
            values["rows"],
            values["tokens"],
            values.get("mismatch/abs_logp", math.nan),
            values["grad_norm"],
        )
        self._say("waiting")
