"""Reads the stream, selects the groups of the next step, and acknowledges groups that have ended. After a
crash, no entry is lost and none is trained twice.

read ─▶ select ─┬─ skipped ─▶ end ─▶ stream, at once
                └─ live ────▶ (a step) ─ mark_trained ─▶ owe ─▶ (a checkpoint) ─ acknowledge ─▶ stream
"""

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256

from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Verdict
from rollout_queue.contract.stream import NO_TOKENS
from rollout_queue.redis.stream_reader import StreamReader
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.entry_reader import BLOCK_S, EntryReader
from trainer_service.groups.acknowledgement import Acknowledgement, acknowledgement_of
from trainer_service.groups.assemble import Assembler, Group, Rules, describe_sessions, describe_waits
from trainer_service.groups.evaluation import Evaluations
from trainer_service.groups.group_rewards import GroupRewards
from trainer_service.groups.guards import Recovery
from trainer_service.groups.screening import ScreenedGroup, with_verdict
from trainer_service.groups.selection import Batch, Order, select
from trainer_service.groups.tally import Tally
from trainer_service.groups.task_rates import TaskRates
from trainer_service.heartbeat import Heartbeat
from trainer_service.rows.row_images import ImageRule, ShownRows, lacking
from trainer_service.rows.rows import Row
from trainer_service.shared_state import Backlog
from trainer_service.storage.run_state import RunState
from trainer_service.trainer_metrics import TrainerMetrics

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

    def contain(self) -> Acknowledgement:
        """Note that a checkpoint contains the steps of everything that is owed now. Returns that: the entries
        and verdicts that were trained and are not acknowledged yet."""
        self._contained = len(self._owed)
        return Acknowledgement.joined(self._owed)

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
            send = partial(self._stream.acknowledge, part.entry_ids, part.verdicts)
            self._heartbeat.retry(send, StorageUnavailable, "waiting")
            self._metrics.acknowledged(part)
        whole = Acknowledgement.joined(parts)
        if whole.sessions and whole not in self._recent:
            self._recent.append(whole)


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


class ImageLoader:
    """Reads images from the stream's store. Waits while Redis does not answer; raises Stopped if the trainer
    is told to stop meanwhile."""

    def __init__(self, stream: StreamReader, heartbeat: Heartbeat) -> None:
        self._stream, self._heartbeat = stream, heartbeat

    def load(self, rows: Sequence[Row]) -> ShownRows[Row]:
        """The rows with the bytes of their images. Sessions whose images are gone are refused."""
        wanted = sorted({image.place.sha256 for row in rows for image in row.images})
        if not wanted:
            return ShownRows(list(rows), {})
        found = self._heartbeat.retry(
            lambda: self._stream.image_bytes(wanted), StorageUnavailable, "waiting", "images in Redis"
        )
        pngs = {name: png for name, png in found.items() if sha256(png).hexdigest() == name}
        refused = {row.session_id: why for row in rows if (why := lacking(row.images, pngs)) is not None}
        shown = [
            replace(row, images=tuple(replace(each, png=pngs[each.place.sha256]) for each in row.images))
            for row in rows
            if row.session_id not in refused
        ]
        return ShownRows(shown, refused)


WHILE_PAUSED = Verdict(
    code="not_for_training", detail="it ended while the training was paused (trainer.paused_traffic)"
)


class Intake:
    """Keeps the sessions that were read and have not ended. Every method that reads or acknowledges waits
    while Redis does not answer, and raises Stopped if the trainer is told to stop meanwhile."""

    def __init__(
        self,
        stream: StreamReader,
        algorithm: AlgorithmSettings,
        vocab_size: int,
        heartbeat: Heartbeat,
        metrics: TrainerMetrics,
        experts_width: int = 0,
        images: ImageRule | None = None,
    ) -> None:
        """`experts_width` and `images` are as in `Rules`."""
        self._algorithm = algorithm
        self._rules = Rules(
            vocab_size,
            algorithm.shaping.truncated != "mask",
            algorithm.group_wait_s,
            algorithm.group_deadline_s,
            algorithm.group_min_size,
            algorithm.over_sampling,
            experts_width,
            images,
        )
        self._assembler = Assembler(self._rules)
        self._order = Order()
        self._tasks = TaskRates(algorithm.curriculum)
        self._heartbeat, self._metrics = heartbeat, metrics
        self._reader = EntryReader(stream, heartbeat)
        self._acknowledger = Acknowledger(stream, heartbeat, metrics)
        self.acknowledge = self._acknowledger.acknowledge_contained
        self.evaluations = Evaluations()
        self._tally = Tally(rollouts_per_step=algorithm.min_live_rows)
        self._live_rows = 0
        """How many rows with an advantage the last selection found."""
        self._was_full = False
        """Whether the last selection found a full batch."""
        self._too_old_after_step = 0
        """How many unfinished sessions have tokens that the next step would make too old."""
        self.shown = ImageLoader(stream, heartbeat).load
        self.rewards = GroupRewards()
        self.undone: Sequence[Recovery] = ()
        """What versions sampled that one of these undid is not trained."""

    def resume(self, state: RunState) -> None:
        """Read again every entry that was delivered and not acknowledged. Entries that the checkpoint
        contains are only acknowledged, and not trained again."""
        self._assembler = Assembler(self._rules, state.settled, state.gone)
        self._tasks = TaskRates(self._algorithm.curriculum, state.task_rates)
        self._heartbeat.note_tasks(self._tasks.state)
        self.evaluations = Evaluations(state.evaluations)
        self._metrics.show_evaluations(state.evaluations.scores)
        self._heartbeat.note_evaluations(self.evaluations.metrics())
        pending = self._reader.reclaim()
        trained = set(state.owed.entry_ids)
        self._acknowledger.resume(state.owed, {entry.entry_id for entry in pending})
        self._reader.add((entry for entry in pending if entry.entry_id not in trained), self._assembler)
        if pending or state.step:
            self._order.catch_up()
        logger.info("%d pending entries; the checkpoint contains %d entries", len(pending), len(trained))

    def read(self) -> None:
        """Read new entries. Waits a moment for the first, unless the last batch was full: then the next one
        may be here already."""
        self._reader.read_into(self._assembler, 0 if self._was_full else BLOCK_S)

    def select(self, version: int, algorithm: AlgorithmSettings, first: Collection[str] = ()) -> Batch:
        """The groups of the next step. Groups whose ids are in `first` come before the others. The batch is
        not full while it has too few rows, or while the step would make unfinished sessions too old. Ends the
        groups that train nothing."""
        patience_s = algorithm.flush_after_s
        flush = patience_s is not None and self._reader.idle_s >= patience_s
        complete = self._complete(version, algorithm, first)
        batch = select(complete, version, algorithm, flush, self.undone)
        self._live_rows = batch.live_rows
        self.end([*batch.skipped, *self._order.beyond_bound(batch, version, algorithm)])
        self._too_old_after_step = 0
        if batch.full and algorithm.stale == "wait":
            oldest = algorithm.oldest_allowed(version)
            self._too_old_after_step = self._assembler.count_oldest_at(oldest, complete)
        batch = batch._replace(full=batch.full and not self._too_old_after_step)
        self._order.note(complete, batch, algorithm)
        self._was_full = batch.full
        return batch

    def _complete(self, version: int, algorithm: AlgorithmSettings, first: Collection[str]) -> list[Group]:
        """The complete groups in the order in which steps take them. Ends those that are overtaken."""
        complete = self._assembler.complete(self._reader.caught_up)
        self.rewards.keep(self._assembler.group_ids())
        for group in complete:
            self.rewards.add(group)
        ends = self._order.overtaken(complete, version, algorithm)
        self.end(ends)
        ended = {end.group.name for end in ends}
        left = [group for group in complete if group.name not in ended]
        return self._order.in_order(left, algorithm, first, self._tasks.prefers)

    def mark_trained(
        self,
        groups: Sequence[ScreenedGroup],
        rows: Sequence[Row],
        made: TrainedStep,
        records: Mapping[tuple[str, str], bytes] = NO_TOKENS,
    ) -> dict[str, float]:
        """Note that the step `made` has put these groups into the weights. They are never selected again, and
        are acknowledged after the next checkpoint, with the `records` of their turns. Returns the metrics of
        all groups that ended since the last step."""
        for screened in groups:
            self._tally.add(screened)
            self._acknowledger.owe(acknowledgement_of(screened, made.step, made.version, records))
            self._assembler.release(screened.group)
        self._acknowledger.owe(Acknowledgement([], {}, [], [made]))
        self.evaluations.note_version(made.version, made.step)
        self._count(groups)
        return self._tally.finish_step(rows)

    def end(self, skipped: Sequence[ScreenedGroup]) -> None:
        """End groups that no step will use: acknowledge them, and entries that came after their session had
        ended."""
        freed, late = self._assembler.take_useless_entries()
        self._acknowledger.end([acknowledgement_of(screened) for screened in skipped], freed, late)
        for screened in skipped:
            if any(member.evaluation is None for member in screened.group.members):
                logger.info("group %s is not trained: %s", screened.group.group_id, screened.skip_reason)
            self._tally.add(screened)
            self._assembler.release(screened.group)
        self._count(skipped)

    def discard(self, groups: Sequence[ScreenedGroup]) -> None:
        """End groups without training, because the training is paused."""
        self.end([with_verdict(each, WHILE_PAUSED) for each in groups])

    def _count(self, ended: Sequence[ScreenedGroup]) -> None:
        groups = [screened.group for screened in ended]
        if not groups:
            return
        self._tasks.add(groups)
        self._heartbeat.note_tasks(self._tasks.state)
        members = (member for group in groups for member in group.members)
        changed = self.evaluations.add(each.evaluation for each in members if each.evaluation)
        for score in changed:
            self._metrics.evaluated(score, self.evaluations.step_of(score.version))
        if changed:
            self._metrics.forget_evaluations(self.evaluations.forget_oldest())
            self._heartbeat.note_evaluations(self.evaluations.metrics())

    def run_state(self, step: int, version: int) -> RunState:
        """The state that a checkpoint stores now, beside the weights. When it is durable, `acknowledge`."""
        return RunState(
            step=step,
            version=version,
            owed=self._acknowledger.contain(),
            settled=list(self._assembler.settled),
            gone=dict(self._assembler.gone),
            evaluations=self.evaluations.state,
            task_rates=self._tasks.state,
        )

    @property
    def backlog(self) -> Backlog:
        return Backlog(
            waiting=self._assembler.counts().ended,
            owed=self._acknowledger.owed_sessions,
            per_step=self._tally.rollouts_per_step,
            groups=self.rewards.compared,
            groups_different=self.rewards.different,
        )

    def waiting_for(self) -> str:
        """What the next step waits for, in a sentence."""
        if self._too_old_after_step:
            return f"{self._too_old_after_step} unfinished sessions, which the next step would make too old"
        rows = f"{self._algorithm.min_live_rows} rows with an advantage, of which {self._live_rows} are here"
        parts = [rows, describe_sessions(self._assembler.counts())]
        return "; ".join(filter(None, [*parts, describe_waits(self._assembler.waits(), clock.now())]))
