"""Trains on the turns of agents, and publishes the weights. The loop is in loop.py; a round does this:

    read ─▶ select ─▶ train ─▶ (guards) ─▶ publish, and at times: checkpoint ─▶ acknowledge
     ▲        │ not full yet       └─ an alarm: the weights of an older checkpoint    │
     └────────┴───────────────────────────────────────────────────────────────────────┘

Agents' sessions arrive as entries of a stream: turns, rewards, outcomes. The intake collects them into groups
of sessions whose rewards are compared, and selects the groups of a step. A trained session's entries are
acknowledged once a durable checkpoint contains its step, another one's once its verdict is final. So stream
and checkpoint tell what is left to do after a crash.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial

from rollout_queue import clock
from rollout_queue.service_log import log_ids
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.entry_reader import BLOCK_S
from trainer_service.groups.reward_guard import Alarm
from trainer_service.groups.screening import ScreenedGroup
from trainer_service.groups.selection import Batch
from trainer_service.heartbeat import Heartbeat
from trainer_service.intake import Intake
from trainer_service.loop import TrainingLoop
from trainer_service.publishing.publisher import Publisher, Snapshot, VersionNumbers
from trainer_service.publishing.recovery import Hold, Recoveries, check_restorable, choice_of, recovery_to
from trainer_service.settings import TrainerSettings
from trainer_service.shared_state import Phase, SharedState
from trainer_service.step.device_memory import DeviceMemory
from trainer_service.step.group_trainer import Diverged, GroupTrainer, NotFinite
from trainer_service.step.ranks import DistributedPolicy
from trainer_service.step.step_attempts import StepAttempts
from trainer_service.step.teacher import TeacherClient
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.checkpoint_cycle import CheckpointCycle, Contents
from trainer_service.storage.durable_files import DiskRetry
from trainer_service.storage.run_state import LedgerStep, RunState, VersionFile
from trainer_service.trainer_metrics import Stopwatch, TrainerMetrics

logger = logging.getLogger(__name__)


def report_step(
    step: int,
    version: int,
    values: Mapping[str, float],
    stopwatch: Stopwatch,
    metrics: TrainerMetrics,
    heartbeat: Heartbeat,
) -> None:
    """Report that `step` made `version`. `values` are the step's metrics; the seconds of its phases are
    added."""
    place = {"step": step, "version": version, "time": clock.now()}
    values = {**place, **values, **stopwatch.laps(values["tokens"])}
    metrics.stepped(values)
    heartbeat.note(step, version, values)
    logger.info(
        "step %d made version %d: reward %.3f, %d rows, %d tokens, |dlogprob| %.2g, gradient %.3g",
        step,
        version,
        values["reward_mean"],
        values["rows"],
        values["tokens"],
        values.get("mismatch/abs_logp", math.nan),
        values["grad_norm"],
    )


class VersionContent:
    """With `adapters`, only adapters are published until every rollout server refuses them."""

    def __init__(self, policy: DistributedPolicy, publisher: Publisher, *, adapters: bool) -> None:
        self._policy, self._publisher, self._adapters = policy, publisher, adapters

    def snapshot(self) -> Snapshot:
        """Copy it into host memory."""
        if self._adapters and self._publisher.refused is not None:
            self._adapters = False
            logger.warning("every server refuses adapters: from now on, whole weights travel")
        return self._policy.adapter_snapshot() if self._adapters else self._policy.snapshot()


class Trainer(TrainingLoop):
    """The loop over turns.

    `policy` is the model on all ranks, driven by rank 0. `heartbeat` reports the trainer to Redis, and
    confirms the lease: only one trainer trains. `teacher` scores the sampled tokens with a better model.
    `memory` is the device's; engines may use it between steps.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        policy: DistributedPolicy,
        intake: Intake,
        checkpoints: Checkpoints,
        publisher: Publisher,
        metrics: TrainerMetrics,
        shared_state: SharedState,
        heartbeat: Heartbeat,
        teacher: TeacherClient | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        super().__init__(metrics, shared_state)
        disk = DiskRetry(heartbeat, metrics, "waiting", "checkpoint")
        self._settings, self._heartbeat = settings, heartbeat
        self._policy, self._intake, self.publisher = policy, intake, publisher
        self._recoveries = Recoveries(settings, intake.rewards, metrics)
        self._numbers = VersionNumbers(VersionFile(settings.checkpoint_dir), publisher, disk)
        self.hold = Hold(settings, publisher, intake.rewards.by_version, disk, shared_state)
        self._memory = memory or DeviceMemory((), heartbeat)
        self._attempts = StepAttempts.beside(settings.checkpoint_dir)
        parts = (self._attempts, teacher, intake.shown, settings.record_tokens)
        self._groups = GroupTrainer(policy, settings.algorithm, heartbeat, *parts)
        self._stopwatch = watch = Stopwatch()
        contents = Contents(
            self._state, lambda: intake.evaluations.state, self._recoveries.wanted, self._acknowledge
        )
        self._cycle = CheckpointCycle(checkpoints, policy, settings, heartbeat, watch, disk, contents)
        self._content = VersionContent(policy, publisher, adapters=settings.transport == "adapter")
        self.step, self.version = 0, settings.initial_version
        shared_state.model_checks = policy.model_checks

    def start(self) -> None:
        """Continue from the last checkpoint, and read the entries again that are not acknowledged."""
        with self._memory.held(self._policy):
            self._cycle.keep_initial(self._settings.initial_version)
            state = self._cycle.restore() or RunState(version=self._settings.initial_version)
        self.step, self.version = state.step, state.version
        self._groups.resume(state)
        self._recoveries.resume(state)
        self._metrics.resume(self.step)
        self._heartbeat.note(self.step, self.version)
        self._heartbeat.note_refusal(self._settings.paused_traffic == "refuse")
        self._report("waiting")
        self._intake.resume(state)
        self._note_recoveries()
        self._shared_state.ready = True
        if held := self.hold.take_over(self.version):
            self._recover_or_hold(held.alarm, held.version)
        if self.hold.reason is None and self.step and self.step % self._settings.publish_every_steps == 0:
            self.publisher.resume(self.version, self.step, self._content.snapshot)

    def follow_up(self) -> None:
        self.publisher.follow()
        self._cycle.save_if_due()

    def work(self) -> bool:
        """Select, train, save, publish. Returns whether a step was made."""
        if self.hold.reason is not None:  # the hold has ended
            self.hold.release(self._publish_newest)
        batch, algorithm = self._select()
        if alarm := self._recoveries.check_rewards():
            self._recover_or_hold(alarm, self.version)
            return False
        if not batch.full:
            self._learn_early(batch.groups, algorithm)
            return False
        values = self._train(batch.groups, algorithm)
        if values is None:
            return False
        made = self.step, self.version
        alarm = self._recoveries.check_step({"step": self.step, **values})
        if alarm is not None:  # before a checkpoint contains the step
            self._recover_or_hold(alarm, self.version)
        self._cycle.save_if_due()
        self._publish_if_due(values, made, held=alarm is not None)
        return True

    def pause(self) -> None:
        """Read only."""
        self._report("paused")
        self._shared_state.sleep(BLOCK_S)
        batch, _ = self._select()  # groups that no step will use end
        if self._settings.paused_traffic == "discard":
            self._intake.discard(batch.groups)

    def _select(self) -> tuple[Batch, AlgorithmSettings]:
        """The groups of the next step, and the algorithm for it, which may depend on the last step."""
        with self._stopwatch.timed("read"):
            self._intake.read()
            algorithm = self._settings.algorithm.after(self._shared_state.snapshot.metrics)
            algorithm = self._attempts.eased(algorithm)
            self._heartbeat.note_row_bound(algorithm.max_row_tokens)
            return self._intake.select(self.version, algorithm, self._groups.early.group_ids), algorithm

    def _learn_early(self, groups: Sequence[ScreenedGroup], algorithm: AlgorithmSettings) -> None:
        """While the step waits for more groups, learn from those that are here: the early groups. If engines
        use the device, there is no such pass: they sample the groups that the step waits for."""
        early_pass = None if self._memory.shared else self._groups.early_pass(groups, self.version, algorithm)
        if early_pass is not None:
            with self._stopwatch.timed("train"):
                self._report("training")
                early_pass()
        self._report("waiting")

    def _train(self, groups: list[ScreenedGroup], algorithm: AlgorithmSettings) -> Mapping[str, float] | None:
        """Make a step of these groups. Returns its metrics, or None if these groups allow no step now. Raises
        Diverged if the weights can no longer be used."""
        if refused := self._attempts.refused(groups, partial(self._try_alone, algorithm)):
            self._intake.end(refused)
            return None
        scored = self._groups.ask_teacher(groups)
        if scored.refused:  # by the teacher
            self._intake.end(scored.refused)
        if not scored.rows:
            return None
        # Before the step, because nothing may fail between new weights and their number.
        version, log_ids().step = self._numbers.reserve_after(self.version), self.step + 1
        with self._memory.held(self._policy), self._stopwatch.timed("train"):
            self._report("training")
            values = self._groups.step(scored, self.version, algorithm)
        if values is None:  # it did not fit into the memory; the next one is smaller
            return None
        if isinstance(values, NotFinite):
            self._intake.end(values.refused)  # the groups whose gradient is not finite
            if values.diverged:  # an earlier update of this step has changed the weights
                raise Diverged(f"step {self.step + 1}, {values.diverged}")
            return None
        self.step += 1
        base, self.version = self.version, version
        self._heartbeat.note(self.step, self.version)
        self._cycle.add(made := LedgerStep.of(self.step, self.version, scored.rows))
        trained = made.from_base(base), self._groups.records
        return values | self._intake.mark_trained(scored.groups, scored.rows, *trained)

    def _try_alone(self, algorithm: AlgorithmSettings, screened: ScreenedGroup) -> None:
        """Compute the gradient of one group, which may end the process."""
        with self._memory.held(self._policy):
            self._groups.gradient_is_finite([screened], self.version, algorithm)

    def _recover_or_hold(self, alarm: Alarm, undone: int) -> None:
        """Go back to the best other version that has a checkpoint. Continue, or hold the training there."""
        alarm = self.publisher.explained(alarm)
        self._cycle.settle(wait=True)
        target = self._recoveries.target(alarm, self._cycle.versions().keys() - {undone})
        if held := target is None or self._recoveries.used_up or self.hold.reason is not None:
            self.hold.hold(alarm, undone)
        if target is None:  # the weights are the first ones
            self._recoveries.settle()
            return
        reason = f"{alarm.reason}; {choice_of(target)}"
        self._set_back(target.version, reason, automatic=True, publish=not held)

    def roll_back(self, version: int) -> None:
        self._cycle.settle(wait=True)
        check_restorable(version, self._cycle.versions())
        self._set_back(version, "an operator asked for it", automatic=False)
        self.hold.forget()

    @property
    def may_save(self) -> bool:
        return not self._recoveries.suspects

    def save_if_outdated(self) -> None:
        self._cycle.save_if_outdated()

    def close(self) -> None:
        self.publisher.close()
        self._memory.close()

    def _set_back(self, restored: int, reason: str, *, automatic: bool, publish: bool = True) -> None:
        """Take an older version's weights under a new number. A checkpoint has both, and the position."""
        version = self._numbers.reserve_after(self.version)
        self._groups.early.discard()
        with self._memory.held(self._policy):
            self._cycle.load(restored, self._recoveries.next_rate_scale)
        self.version = version
        self._recoveries.note(recovery_to(restored, version, self.step, reason, automatic=automatic))
        self._heartbeat.note(self.step, version)
        self._cycle.save()
        if publish:
            self._publish_newest()

    def _note_recoveries(self) -> None:
        self._intake.undone = self._recoveries.state.done
        self._heartbeat.note_recoveries(self._recoveries.state, self._cycle.versions())

    def _publish_if_due(self, values: Mapping[str, float], made: tuple[int, int], *, held: bool) -> None:
        """Publish the new version, unless its step raised an alarm."""
        try:
            if not held and self.step % self._settings.publish_every_steps == 0:
                self._publish_newest()
        finally:  # reported even if the trainer is told to stop while the gateway is away
            report_step(*made, values, self._stopwatch, self._metrics, self._heartbeat)
            self._report("waiting")

    def _publish_newest(self) -> None:
        if not self.step:
            return
        self._heartbeat.confirm()
        with self._stopwatch.timed("publish"):
            self._report("publishing")
            made, best = (self.version, self.step, self._content.snapshot), self.hold.rollback_target()
            self.publisher.publish(*made, best and best.version, self._groups.trace)

    def _state(self) -> RunState:
        state = self._intake.run_state(self.step, self.version)
        return self._recoveries.stored_in(self._groups.stored_in(state))

    def _acknowledge(self) -> None:
        """Acknowledge the entries that the last checkpoint contains, which is durable."""
        kept = {*self.publisher.versions(), *self._cycle.versions()}
        self._intake.rewards.by_version.keep({self._settings.initial_version, *kept})
        self._note_recoveries()
        with self._stopwatch.timed("acknowledge"):
            self._intake.acknowledge()

    def _report(self, phase: Phase) -> None:
        waits = [self._intake.waiting_for()] if phase == "waiting" else []
        if waits and (tokens := self._groups.early.tokens):
            waits.append(f"{tokens} tokens are already learned")
        if waits and self.publisher.waits_for:
            waits.append(f"a version waits for {self.publisher.waits_for}")
        waits += [self._cycle.waits_for] if waits and self._cycle.waits_for else []
        if phase == "paused" and self.hold.reason:
            waits = [f"POST /resume, since {self.hold.reason}"]
        if self._shared_state.ready:
            self._heartbeat.note_backlog(self._intake.backlog)
        self._heartbeat.beat(phase, "; ".join(waits) or None)
