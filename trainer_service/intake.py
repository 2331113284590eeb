"""The trainer's hold on the stream: what was read, what of it can be trained, and what is finished with.

read ─▶ Assembler ─▶ judge ─┬─ silent ─▶ acknowledge, with verdicts
                            └─ live ───▶ batch ─▶ (a step) ─▶ owe ─▶ (a checkpoint) ─▶ acknowledge
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from statistics import fmean

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import Verdict
from rollout_queue.contract.stream import Entry, StreamReader
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Assembler, Group, Rules
from trainer_service.groups.evaluation import Evaluations, sampled_by
from trainer_service.groups.recall import read_finished
from trainer_service.groups.settlement import (
    Acknowledgement,
    Batch,
    ScreenedGroup,
    judge,
    refused,
    select,
    settle,
)
from trainer_service.groups.tally import Tally
from trainer_service.groups.version_scores import VersionScores
from trainer_service.groups.waits import sentence
from trainer_service.metrics import TrainerMetrics
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.status.shared_state import Backlog
from trainer_service.storage.checkpoint import RunState

logger = logging.getLogger(__name__)

READ_COUNT = 1000
BLOCK_S = 0.25
RECENT = 8
"""Acknowledgements that are remembered, so that their verdicts can be given again."""
SETTLED_AT_ONCE = 500
"""Groups in one acknowledgement; Redis serves nobody else meanwhile."""
STEPS_REMEMBERED = 8
"""Steps over which the use of rollouts is averaged."""


class Intake:
    """Owns the reader and the assembler."""

    def __init__(
        self,
        stream: StreamReader,
        algorithm: AlgorithmSettings,
        vocab_size: int,
        heartbeat: Heartbeat,
        metrics: TrainerMetrics,
    ) -> None:
        self._stream, self._heartbeat, self._metrics = stream, heartbeat, metrics
        self._algorithm = algorithm
        self._rules = Rules(
            vocab_size,
            algorithm.shaping.truncated != "mask",
            algorithm.group_wait_s,
            algorithm.group_deadline_s,
            algorithm.group_min_size,
        )
        self._assembler = Assembler(self._rules)
        self._owed: list[Acknowledgement] = []
        self._recent: deque[Acknowledgement] = deque(maxlen=RECENT)
        """What was acknowledged last: a Redis that a power failure put back has forgotten it."""
        self._live_rows = 0
        """Rows with an advantage that are here. A count: nobody holds rows between steps, but for those that
        are begun."""
        self._heard_at = time.monotonic()
        self._caught_up = False
        """Whether the last read took all there was."""
        self._per_step: deque[int] = deque([algorithm.min_live_rows], maxlen=STEPS_REMEMBERED)
        """Rewarded rollouts that ended between steps. Before the first, the fewest that can make one."""
        self._endangered = 0
        """Sessions under way that the step which is ready would make too old."""
        self._weighed: set[str] = set()
        """Groups, of those that are held, whose reward was told."""
        self._rewards: list[float] = []
        """Their mean rewards, since somebody asked."""
        self.version_scores = VersionScores()
        self.tally = Tally()
        """What ended since the last step."""
        self.evaluations = Evaluations()

    def resume(self, state: RunState) -> None:
        """Take up everything that was read and not acknowledged; what the weights contain is only owed."""
        self._assembler = Assembler(self._rules, state.settled, state.gone)
        self.evaluations = Evaluations(state.evaluations)
        self._metrics.show_evaluations(state.evaluations.scores)
        self._heartbeat.note_evaluations(self.evaluations.told())
        pending = self._reclaim()
        owed = set(state.owed.entry_ids)
        self._recent.append(state.owed)
        # Entries that are pending no longer were acknowledged before the crash, and counted then.
        if any(entry.entry_id in owed for entry in pending):
            self._owed = [state.owed]
            self.acknowledge()
        self._take(entry for entry in pending if entry.entry_id not in owed)
        logger.info("%d entries to take up, %d of them trained", len(pending), len(owed))

    def read(self) -> None:
        """What is new. Waits a moment for it, and for Redis as long as it takes."""
        try:
            entries = list(self._stream.read(READ_COUNT, BLOCK_S))
            self._caught_up = len(entries) < READ_COUNT
        except StorageUnavailable as error:
            logger.warning("%s", error)
            # What was delivered while the answer was lost is pending, and nobody else takes it up.
            entries = self._reclaim()
            self._caught_up = False
        self._take(entries)
        if entries:
            self._heard_at = time.monotonic()

    def batch(self, version: int, algorithm: AlgorithmSettings, begun: Collection[str] = ()) -> Batch:
        """The groups of the next step, which is not full while there are too few, or it would be too early.
        Those whose ids are in `begun` come first. Ends the groups that teach nothing, as far as it comes:
        after an outage, thousands wait for later steps."""
        silence_s, patience_s = time.monotonic() - self._heard_at, algorithm.flush_after_s
        flush = patience_s is not None and silence_s >= patience_s
        silent: list[ScreenedGroup] = []
        complete = self._assembler.complete(self._caught_up)
        self._weighed.intersection_update(self._assembler.group_ids())
        complete.sort(key=lambda group: group.group_id not in begun)
        batch = select(self._live(complete, version, algorithm, silent), algorithm, flush)
        self.end(silent)
        self._endangered = 0
        if batch.full and algorithm.stale == "wait":
            self._endangered = self._assembler.endangered(version - algorithm.max_staleness, complete)
        return batch._replace(full=batch.full and not self._endangered)

    def rewards(self) -> list[float]:
        """The mean reward of each group that was judged, whatever became of it, since somebody asked."""
        rewards, self._rewards = self._rewards, []
        return rewards

    def owe(self, batch: list[ScreenedGroup], step: int, version: int) -> None:
        """The weights contain these groups now: never give them out again, acknowledge them once durable."""
        for judged in batch:
            self.tally.add(judged)
            self._owed.append(settle(judged, step, version))
            self._assembler.release(judged.group)
        self._per_step.append(self.tally.rollouts)
        self.evaluations.made(version, step)
        self._evaluate(batch)

    def refuse(self, judged: list[ScreenedGroup], detail: str) -> None:
        """End groups that no optimizer can use, at once: whatever becomes of the step, they are in none."""
        verdict = Verdict(code="invalid", detail=detail)
        self.end([refused(group, verdict) for group in judged])

    def acknowledge(self) -> None:
        """Finish with everything owed, in one transaction. Only after a durable checkpoint contains it."""
        if self._owed:
            self._settle(self._owed)
            self._owed = []

    @property
    def owed(self) -> Acknowledgement:
        return Acknowledgement.joined(self._owed)

    @property
    def settled(self) -> list[str]:
        return self._assembler.settled

    @property
    def gone(self) -> dict[str, int]:
        return self._assembler.gone

    @property
    def backlog(self) -> Backlog:
        """What is ahead of a rollout that begins now."""
        return Backlog(
            waiting=self._assembler.census()[2],
            owed=sum(len(settlement.sessions) for settlement in self._owed),
            per_step=sum(self._per_step) / len(self._per_step),
        )

    def waiting_for(self) -> str:
        """What keeps the next step from happening, in a sentence."""
        if self._endangered:
            return f"{self._endangered} sessions under way, which the next step would make too old"
        unfinished, unrewarded, ended = self._assembler.census()
        said = (
            f"{self._algorithm.min_live_rows} rows with an advantage, of which {self._live_rows} are here; "
            f"of the sessions read, {unfinished} go on, {unrewarded} wait for a reward, {ended} have ended"
        )
        groups = sentence(self._assembler.waits(), time.time())
        return said if groups is None else f"{said}; {groups}"

    def _take(self, entries: Iterable[Entry]) -> None:
        """A trainer that died had finished with more than its checkpoint says, and its verdicts tell."""
        self._assembler.add(entries)
        sessions, groups = self._assembler.met()
        if sessions or groups:
            past = self._heartbeat.retry(
                lambda: read_finished(self._stream, sessions, groups), StorageUnavailable, "waiting"
            )
            self._assembler.recall(past.settled, past.gone)

    def _live(
        self,
        complete: Iterable[Group],
        version: int,
        algorithm: AlgorithmSettings,
        silent: list[ScreenedGroup],
    ) -> Iterator[ScreenedGroup]:
        """Judges one group after the other; those that teach nothing go to `silent`."""
        self._live_rows = 0
        for group in complete:
            judged = judge(group, version, algorithm)
            self._weigh(group)
            if judged.silence:
                silent.append(judged)
            else:
                self._live_rows += judged.live_rows
                yield judged

    def _weigh(self, group: Group) -> None:
        """Once, though it is judged again until its step comes. Evaluation is counted by version."""
        if group.group_id in self._weighed:
            return
        self._weighed.add(group.group_id)
        rewards = []
        for member in group.rollouts:
            if member.evaluation is None and member.reward is not None:
                rewards.append(member.reward)
                if (version := sampled_by(member.turns)) is not None:
                    self.version_scores.add(version, member.reward)
        if rewards:
            self._rewards.append(fmean(rewards))

    def end(self, silent: list[ScreenedGroup]) -> None:
        """Acknowledge groups that no step will use, and records that came after their session's end."""
        ended = [settle(judged) for judged in silent]
        if freed := self._assembler.freed():  # never after their deletion, which may be among these groups
            ended.insert(0, Acknowledgement(freed, {}, []))
        if strays := self._assembler.strays():
            logger.info("%d entries came after their session had ended", len(strays))
            # Behind what is owed, so that a crash cannot part a session's entries.
            (self._owed or ended).append(Acknowledgement(strays, {}, []))
            came = set(strays)
            ended += [each for each in self._recent if came.intersection(each.entry_ids)]
        for start in range(0, len(ended), SETTLED_AT_ONCE):
            self._settle(ended[start : start + SETTLED_AT_ONCE])
        for judged in silent:
            logger.info("group %s is not trained: %s", judged.group.group_id, judged.silence)
            self.tally.add(judged)
            self._assembler.release(judged.group)
        self._evaluate(silent)

    def _evaluate(self, ended: Iterable[ScreenedGroup]) -> None:
        """Count what was never to be trained, and tell it by version."""
        members = (member for judged in ended for member in judged.group.members)
        changed = self.evaluations.add(each.evaluation for each in members if each.evaluation)
        for scores in changed:
            self._metrics.evaluated(scores, self.evaluations.step_of(scores.version))
        if changed:
            self._metrics.forget_evaluations(self.evaluations.forget())
            self._heartbeat.note_evaluations(self.evaluations.told())

    def _settle(self, ended: list[Acknowledgement]) -> None:
        whole = Acknowledgement.joined(ended)
        self._heartbeat.retry(
            lambda: self._stream.acknowledge(whole.entry_ids, whole.verdicts), StorageUnavailable, "waiting"
        )
        self._metrics.settled(whole)
        if whole.sessions and whole not in self._recent:
            self._recent.append(whole)

    def _reclaim(self) -> list[Entry]:
        return self._heartbeat.retry(lambda: list(self._stream.reclaim()), StorageUnavailable, "waiting")
