"""Reads for `GET /admin/pipeline` how many sessions are at each stage, and what all wait for.

open ─▶ waiting_reward ─▶ ended (its group is not complete: group_incomplete; else: ready) ─▶ a verdict

The work of one reading is bounded, however many sessions there are. Redis counts verdicts when they are given
(`weir:verdicts`). Only sessions that may still expire need action. Of these, the `MAX_SESSIONS` that expire
first are read. Requests within `SHARED_S` seconds of a reading share its report.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.head import GroupProgress, SessionProgress, SessionStage
from rollout_queue.protocol.conditions import counted, duration
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.session_lists import progress_of
from rollout_queue.redis.session_retention import forgotten_sessions

MOST_NAMED = 5
"""The most sessions that one sentence names."""
MAX_GROUPS = 50
"""The most groups in one report, which has those that wait longest."""


@dataclass(frozen=True)
class GroupReport:
    """A group that waits for members; `since` is when the first of them ended."""

    group_id: str
    size: int
    ended: int
    open: int
    waiting_reward: int
    not_opened: int
    since: float | None
    waiting_for: str


@dataclass(frozen=True)
class PipelineReport:
    """How many sessions and groups wait, and for what. Of the sessions that may still expire, `looked_at`
    were read; the others, and their groups, are not counted."""

    states: Mapping[str, int]
    verdicts: Mapping[str, int]
    looked_at: int
    may_expire: int
    forgotten: int
    groups: list[GroupReport]
    groups_waiting: int
    trainer: str | None
    notes: list[str]
    """What the numbers do not say: the sentences about sessions that they leave out."""
    sentences: list[str]


class QueueCounts(NamedTuple):
    """How many sessions and records there are, as Redis counts them."""

    sessions: int
    """All sessions that were ever opened, deleted and forgotten ones included."""
    may_expire: int
    """Sessions that may still expire."""
    verdicts: Mapping[str, int]
    forgotten: int
    """Sessions that retention removed after their verdict."""
    entries: int
    """Records in the stream."""
    delivered: int
    """Entries that the trainer has read and not acknowledged."""
    dead: int
    """Records that the trainer could not read."""
    trainer: TrainerReport

    @property
    def past_expiry(self) -> int:
        """Sessions without a verdict that can no longer expire: the trainer has to decide on them.

        An estimate: sessions and counters are not read at the same moment.
        """
        decided = sum(number for name, number in self.verdicts.items() if name.startswith("session:"))
        return max(0, self.sessions - self.may_expire - decided)


class IncompleteGroup(NamedTuple):
    """A group that waits for members."""

    group_id: str
    progress: GroupProgress
    since: float | None
    """When the first member ended, of the members that were read; None if none has ended."""


class PipelineSnapshot(NamedTuple):
    """One reading of Redis."""

    now: float
    queue: QueueCounts
    found: Sequence[SessionProgress]
    """The sessions that were read."""
    expires_at: Mapping[str, float]
    """When each of them expires, by session id."""
    groups: Mapping[str, IncompleteGroup]
    """The groups that wait for members, by group id."""

    def of(self, stage: SessionStage) -> list[SessionProgress]:
        return [each for each in self.found if each.stage == stage]

    def incomplete(self) -> list[SessionProgress]:
        return [each for each in self.of("ended") if each.spec and each.spec.group_id in self.groups]

    def ready(self) -> list[SessionProgress]:
        return [each for each in self.of("ended") if each.spec and each.spec.group_id not in self.groups]


def report_of(snapshot: PipelineSnapshot) -> PipelineReport:
    """What the snapshot says, in numbers and in sentences."""
    queue = snapshot.queue
    waiting = sorted(
        (group for group in snapshot.groups.values() if group.progress.ended or group.since is not None),
        key=lambda group: snapshot.now if group.since is None else group.since,
    )
    open_, unrewarded = len(snapshot.of("open")), len(snapshot.of("waiting_reward"))
    finished = max(0, queue.sessions - queue.may_expire)
    finished += len(snapshot.of("ended")) + len(snapshot.of("decided"))
    return PipelineReport(
        states={"open": open_, "waiting_reward": unrewarded, "finished": finished},
        verdicts={
            "session:open": open_,
            "session:waiting_reward": unrewarded,
            "session:group_incomplete": len(snapshot.incomplete()),
            "session:ready": len(snapshot.ready()),
            **queue.verdicts,
        },
        looked_at=len(snapshot.found),
        may_expire=queue.may_expire,
        forgotten=queue.forgotten,
        groups=[_group(group) for group in waiting[:MAX_GROUPS]],
        groups_waiting=len(waiting),
        trainer=queue.trainer.waiting_for,
        notes=list(_notes(snapshot)),
        sentences=list(_sentences(snapshot, waiting)),
    )


def _group(group: IncompleteGroup) -> GroupReport:
    progress = group.progress
    return GroupReport(
        group_id=group.group_id,
        size=progress.size,
        ended=progress.ended,
        open=progress.open,
        waiting_reward=progress.unrewarded,
        not_opened=progress.missing,
        since=group.since,
        waiting_for=progress.waiting_for,
    )


def _notes(snapshot: PipelineSnapshot) -> Iterator[str]:
    queue = snapshot.queue
    if len(snapshot.found) < queue.may_expire:
        yield (
            f"{counted(queue.may_expire, 'session')} may still expire; of these and their groups, the next "
            f"sentences count only the {len(snapshot.found)} that expire first"
        )
    if unreadable := [each.session_id for each in snapshot.found if not each.readable]:
        yield (
            f"{counted(len(unreadable), 'session')} cannot be read by this build and "
            f"{'does' if len(unreadable) == 1 else 'do'} not expire: {', '.join(unreadable[:MOST_NAMED])}"
            f"{', …' if len(unreadable) > MOST_NAMED else ''}; a newer build reads what it wrote, and "
            "DELETE /sessions/{id} removes what is broken"
        )
    if past := queue.past_expiry:
        yield (
            f"{counted(past, 'session has', 'sessions have')} ended and can no longer expire: each waits "
            "for the trainer's verdict, or for members of its group to end"
        )


def _sentences(snapshot: PipelineSnapshot, waiting: Sequence[IncompleteGroup]) -> Iterator[str]:
    yield from _notes(snapshot)
    yield from _of_sessions(snapshot)
    if waiting:
        oldest = waiting[0]
        since = "" if oldest.since is None else f", since {duration(snapshot.now - oldest.since)}"
        yield (
            f"{counted(len(waiting), 'group waits', 'groups wait')} for members; the longest wait is that of "
            f"{oldest.group_id}{since}: {oldest.progress.ended} of {oldest.progress.size} have ended, "
            f"{oldest.progress.waiting_for}"
        )
    yield from _of_the_trainer(snapshot)


def _of_sessions(snapshot: PipelineSnapshot) -> Iterator[str]:
    if open_ := snapshot.of("open"):
        first = min(snapshot.expires_at[each.session_id] for each in open_)
        yield (
            f"{counted(len(open_), 'session goes on', 'sessions go on')}; without another call, the first "
            f"expires in {duration(first - snapshot.now)}"
        )
    if unrewarded := [(each, each.outcome) for each in snapshot.of("waiting_reward") if each.outcome]:
        oldest, outcome = min(unrewarded, key=lambda pair: pair[1].created_at)
        yield (
            f"{counted(len(unrewarded), 'session waits', 'sessions wait')} for a reward; the oldest has "
            f"waited for {duration(snapshot.now - outcome.created_at)}, and expires in "
            f"{duration(snapshot.expires_at[oldest.session_id] - snapshot.now)}"
        )
    if incomplete := snapshot.incomplete():
        yield (
            f"{counted(len(incomplete), 'session has', 'sessions have')} ended with a reward, and "
            f"{'waits' if len(incomplete) == 1 else 'wait'} for the rest of the group"
        )
    if grouped := [each for each in snapshot.ready() if each.spec and each.spec.group_id]:
        yield (
            f"{counted(len(grouped), 'session is', 'sessions are')} finished and rewarded, and so is the "
            f"whole group: the trainer can train on {'it' if len(grouped) == 1 else 'them'}"
        )
    if alone := len(snapshot.ready()) - len(grouped):
        yield (
            f"{counted(alone, 'session is', 'sessions are')} finished and rewarded, and in no group: by "
            f"default no step trains {'it' if alone == 1 else 'them'}"
        )


def _of_the_trainer(snapshot: PipelineSnapshot) -> Iterator[str]:
    queue, trainer = snapshot.queue, snapshot.queue.trainer
    if queue.entries:
        unread = max(0, queue.entries - queue.delivered)
        yield (
            f"{counted(queue.entries, 'record is', 'records are')} in the stream: the trainer has read "
            f"{queue.delivered} without acknowledging them, and has not read {unread}"
        )
    if queue.forgotten:
        yield (
            f"{counted(queue.forgotten, 'session was', 'sessions were')} removed by retention after the "
            "verdict: only the counters of verdicts still include them"
        )
    if queue.dead:
        yield f"the trainer could not read {counted(queue.dead, 'record')}, now in {key_names.DEAD_LETTERS}"
    if trainer.last_seen is None:
        yield "no trainer has reported yet: nothing is trained before one does"
        return
    ago = duration(snapshot.now - trainer.last_seen)
    yield (
        f"the trainer, at step {trainer.step} and version {trainer.version}, is {trainer.state} "
        f"and waits for {trainer.waiting_for}; it reported this {ago} ago"
    )


MAX_SESSIONS = 2000
SHARED_S = 2.0


class PipelineMonitor:
    """Reads Redis on request, at most once in `SHARED_S`. Requests during a reading wait for its result."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._reading = asyncio.Lock()
        self._read_at = -SHARED_S
        self._report: PipelineReport | None = None

    async def report(self) -> PipelineReport:
        """Raises StorageUnavailable."""
        async with self._reading:
            if self._report is None or clock.monotonic() - self._read_at > SHARED_S:
                self._report = report_of(await _read(self._redis))
                self._read_at = clock.monotonic()
            return self._report


async def _read(redis: Redis) -> PipelineSnapshot:
    queue = await _queue(redis)
    names = await stored(redis.zrange(key_names.DEADLINES, 0, MAX_SESSIONS - 1, withscores=True))
    expires_at = {name.decode(): float(at) for name, at in names}
    found = await progress_of(redis, list(expires_at))
    return PipelineSnapshot(clock.now(), queue, found, expires_at, await _incomplete(redis, found))


async def _queue(redis: Redis) -> QueueCounts:
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.zcard(key_names.SESSIONS)
        pipeline.zcard(key_names.DEADLINES)
        pipeline.hgetall(key_names.VERDICTS)
        pipeline.hgetall(key_names.FORGOTTEN)
        pipeline.xlen(key_names.STREAM)
        pipeline.xlen(key_names.DEAD_LETTERS)
        pipeline.hgetall(key_names.TRAINER)
        pipeline.xpending(key_names.STREAM, key_names.GROUP)
        replies: list[Any] = await stored(pipeline.execute(raise_on_error=False))
    *replied, pending = replies
    for reply in replied:
        if isinstance(reply, Exception):
            raise StorageUnavailable(f"Redis: {reply}") from reply
    sessions, may_expire, verdicts, counts, entries, dead, trainer = replied
    forgotten = forgotten_sessions(counts)
    return QueueCounts(
        sessions=sessions + forgotten,
        may_expire=may_expire,
        forgotten=forgotten,
        verdicts={name.decode(): int(number) for name, number in sorted(verdicts.items())},
        entries=entries,
        # Redis answers with an error while no trainer has read the stream yet.
        delivered=0 if isinstance(pending, Exception) else pending["pending"],
        dead=dead,
        trainer=TrainerReport.of(trainer),
    )


async def _incomplete(redis: Redis, found: Sequence[SessionProgress]) -> dict[str, IncompleteGroup]:
    """The groups of the `found` sessions that wait for members.

    A group's other opened members count as ended: a member that has not ended can still expire, so it is
    among the `found` ones, unless more than `MAX_SESSIONS` can expire.
    """
    members: dict[str, list[SessionProgress]] = {}
    for each in found:
        if each.spec is not None and each.spec.group_id is not None:
            members.setdefault(each.spec.group_id, []).append(each)
    async with redis.pipeline(transaction=False) as pipeline:
        for group_id in members:
            pipeline.hget(key_names.group(group_id), "size")
            pipeline.scard(key_names.group_members(group_id))
        sizes = await stored(pipeline.execute())
    groups: dict[str, IncompleteGroup] = {}
    for index, (group_id, known) in enumerate(members.items()):
        size, opened = int(sizes[2 * index] or 0), int(sizes[2 * index + 1])
        open_ = sum(each.stage == "open" for each in known)
        unrewarded = sum(each.stage == "waiting_reward" for each in known)
        progress = GroupProgress(size or opened, max(0, opened - open_ - unrewarded), open_, unrewarded)
        ends = [each.outcome.created_at for each in known if each.outcome is not None]
        if progress.waiting_for:
            groups[group_id] = IncompleteGroup(group_id, progress, min(ends, default=None))
    return groups
