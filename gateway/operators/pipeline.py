"""`GET /admin/pipeline`: what waits for what, on the way from an open session to trained weights.

open ─▶ waiting_reward ─▶ ended (its group goes on: group_incomplete; else: ready) ─▶ a verdict

The work of a look is bounded, however many sessions there are: verdicts are counted by whoever passes them
(`weir:verdicts`); of the sessions that may still expire, which are all that somebody has to do something
for, `LOOKED_AT` are looked at, those that expire first. Looks are shared: who asks within `SHARED_S` of one
gets that.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from redis.asyncio import Redis
from starlette.responses import Response

from gateway.collaborators import collaborators
from gateway.operators.words import count, span
from gateway.rest.shapes import PipelineReport
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.protocol.trainer import TrainerReport
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.retention import forgotten_sessions
from rollout_queue.redis.standing import GroupStanding, Stage, Standing, standings

LOOKED_AT = 2000
GROUPS_TOLD = 50
SHARED_S = 2.0

router = APIRouter()


@router.get("/pipeline", responses={200: {"model": PipelineReport}})
async def pipeline(request: Request) -> Response:
    """Counts by state and verdict, groups and the trainer with what they wait for, and all of it in words."""
    return JSONResponse(await collaborators(request).pipeline.report())


class Queue(NamedTuple):
    """How much there is, as Redis counts it."""

    sessions: int
    """Ever opened; deleted and forgotten ones too."""
    timed: int
    """Of those, how many may still expire."""
    verdicts: Mapping[str, int]
    forgotten: int
    """Of the sessions, how many were settled and are forgotten."""
    entries: int
    delivered: int
    """Entries that the trainer has read and not acknowledged."""
    dead: int
    trainer: TrainerReport

    @property
    def past_expiry(self) -> int:
        """Without a verdict, and safe from expiry: ended, rewarded, and for the trainer to decide on. As good
        as the counters, which count a verdict twice that a crash made the trainer write twice."""
        decided = sum(number for name, number in self.verdicts.items() if name.startswith("session:"))
        return max(0, self.sessions - self.timed - decided)


class Waiting(NamedTuple):
    """A group of which some have ended and others have not."""

    group_id: str
    standing: GroupStanding
    since: float | None
    """When the first of its members ended that are in sight."""


class Look(NamedTuple):
    """What was found, and when."""

    now: float
    queue: Queue
    found: Sequence[Standing]
    expires_at: Mapping[str, float]
    groups: Mapping[str, Waiting]
    """Those that are not complete."""

    def of(self, stage: Stage) -> list[Standing]:
        return [each for each in self.found if each.stage == stage]

    def incomplete(self) -> list[Standing]:
        return [each for each in self.of("ended") if each.spec and each.spec.group_id in self.groups]

    def ready(self) -> list[Standing]:
        return [each for each in self.of("ended") if each.spec and each.spec.group_id not in self.groups]


class Pipeline:
    """Looks when asked, at most once in `SHARED_S`; whoever asks meanwhile waits for the same look."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._looking = asyncio.Lock()
        self._looked_at = -SHARED_S
        self._report: dict[str, Any] = {}

    async def report(self) -> dict[str, Any]:
        """Raises StorageUnavailable."""
        async with self._looking:
            if time.monotonic() - self._looked_at > SHARED_S:
                self._report = _report(await _look(self._redis))
                self._looked_at = time.monotonic()
            return self._report


async def _look(redis: Redis) -> Look:
    queue = await _queue(redis)
    names = await stored(redis.zrange(keys.DEADLINES, 0, LOOKED_AT - 1, withscores=True))
    expires_at = {name.decode(): float(at) for name, at in names}
    found = await standings(redis, list(expires_at))
    return Look(time.time(), queue, found, expires_at, await _incomplete(redis, found))


async def _queue(redis: Redis) -> Queue:
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.zcard(keys.SESSIONS)
        pipeline.zcard(keys.DEADLINES)
        pipeline.hgetall(keys.VERDICTS)
        pipeline.hgetall(keys.FORGOTTEN)
        pipeline.xlen(keys.STREAM)
        pipeline.xlen(keys.DEAD_LETTERS)
        pipeline.hgetall(keys.TRAINER)
        pipeline.xpending(keys.STREAM, keys.GROUP)
        replies: list[Any] = await stored(pipeline.execute(raise_on_error=False))
    *counted, pending = replies
    for reply in counted:
        if isinstance(reply, Exception):
            raise StorageUnavailable(f"Redis: {reply}") from reply
    sessions, timed, verdicts, counts, entries, dead, trainer = counted
    forgotten = forgotten_sessions(counts)
    return Queue(
        sessions=sessions + forgotten,
        timed=timed,
        forgotten=forgotten,
        verdicts={name.decode(): int(number) for name, number in sorted(verdicts.items())},
        entries=entries,
        delivered=0 if isinstance(pending, Exception) else pending["pending"],  # no trainer has come yet
        dead=dead,
        trainer=TrainerReport.of(trainer),
    )


async def _incomplete(redis: Redis, found: Sequence[Standing]) -> dict[str, Waiting]:
    """The groups of these sessions that lack somebody. Who is lacked can still expire, so it is among them,
    unless there are more than were looked at."""
    members: dict[str, list[Standing]] = {}
    for each in found:
        if each.spec is not None and each.spec.group_id is not None:
            members.setdefault(each.spec.group_id, []).append(each)
    async with redis.pipeline(transaction=False) as pipeline:
        for group_id in members:
            pipeline.hget(keys.group(group_id), "size")
            pipeline.scard(keys.group_members(group_id))
        sizes = await stored(pipeline.execute())
    groups = {}
    for index, (group_id, known) in enumerate(members.items()):
        size, opened = int(sizes[2 * index] or 0), int(sizes[2 * index + 1])
        going = sum(each.stage == "open" for each in known)
        unrewarded = sum(each.stage == "waiting_reward" for each in known)
        standing = GroupStanding(size or opened, max(0, opened - going - unrewarded), going, unrewarded)
        ends = [each.outcome.created_at for each in known if each.outcome is not None]
        if standing.lacks:
            groups[group_id] = Waiting(group_id, standing, min(ends, default=None))
    return groups


# The report


def _report(look: Look) -> dict[str, Any]:
    queue = look.queue
    waiting = sorted(
        (group for group in look.groups.values() if group.standing.ended or group.since is not None),
        key=lambda group: look.now if group.since is None else group.since,
    )
    open_, unrewarded = len(look.of("open")), len(look.of("waiting_reward"))
    return {
        "states": {
            "open": open_,
            "waiting_reward": unrewarded,
            "finished": max(0, queue.sessions - queue.timed)
            + len(look.of("ended"))
            + len(look.of("decided")),
        },
        "verdicts": {
            "session:open": open_,
            "session:waiting_reward": unrewarded,
            "session:group_incomplete": len(look.incomplete()),
            "session:ready": len(look.ready()),
            **queue.verdicts,
        },
        "looked_at": len(look.found),
        "may_expire": queue.timed,
        "forgotten": queue.forgotten,
        "groups": [_group(group) for group in waiting[:GROUPS_TOLD]],
        "groups_waiting": len(waiting),
        "trainer": queue.trainer.waiting_for,
        "sentences": list(_sentences(look, waiting)),
    }


def _group(group: Waiting) -> dict[str, Any]:
    standing = group.standing
    return {
        "group_id": group.group_id,
        "size": standing.size,
        "ended": standing.ended,
        "open": standing.open,
        "waiting_reward": standing.unrewarded,
        "not_opened": standing.missing,
        "since": group.since,
        "waiting_for": standing.lacks,
    }


def _sentences(look: Look, waiting: Sequence[Waiting]) -> Iterator[str]:
    queue = look.queue
    if len(look.found) < queue.timed:
        yield (
            f"{count(queue.timed, 'session')} may still expire; what follows of sessions and groups is of "
            f"the {len(look.found)} that expire first"
        )
    yield from _of_sessions(look)
    if waiting:
        oldest = waiting[0]
        since = "" if oldest.since is None else f", since {span(look.now - oldest.since)}"
        yield (
            f"{count(len(waiting), 'group waits', 'groups wait')} for members; the oldest is "
            f"{oldest.group_id}{since}: {oldest.standing.ended} of {oldest.standing.size} have ended, "
            f"{oldest.standing.lacks}"
        )
    if past := queue.past_expiry:
        yield (
            f"{count(past, 'session')} beyond the time to live, finished and rewarded: for the trainer to "
            "decide on, or for members of their groups to end"
        )
    yield from _of_the_trainer(look)


def _of_sessions(look: Look) -> Iterator[str]:
    if going := look.of("open"):
        first = min(look.expires_at[each.session_id] for each in going)
        yield (
            f"{count(len(going), 'session goes on', 'sessions go on')}; without another call, the first "
            f"expires in {span(first - look.now)}"
        )
    if unrewarded := [(each, each.outcome) for each in look.of("waiting_reward") if each.outcome]:
        oldest, outcome = min(unrewarded, key=lambda pair: pair[1].created_at)
        yield (
            f"{count(len(unrewarded), 'session waits', 'sessions wait')} for a reward; the oldest since "
            f"{span(look.now - outcome.created_at)}, it expires in "
            f"{span(look.expires_at[oldest.session_id] - look.now)}"
        )
    if incomplete := look.incomplete():
        yield (
            f"{count(len(incomplete), 'session has', 'sessions have')} ended with a reward, and "
            f"{'waits' if len(incomplete) == 1 else 'wait'} for the rest of the group"
        )
    if ready := look.ready():
        yield (
            f"{count(len(ready), 'session is', 'sessions are')} finished and rewarded, with the whole group: "
            "for the trainer to take"
        )


def _of_the_trainer(look: Look) -> Iterator[str]:
    queue, said = look.queue, look.queue.trainer
    if queue.entries:
        unread = max(0, queue.entries - queue.delivered)
        yield (
            f"{count(queue.entries, 'record')} in the stream: {queue.delivered} the trainer has read and not "
            f"finished with, {unread} it has not read"
        )
    if queue.forgotten:
        yield (
            f"{count(queue.forgotten, 'session was', 'sessions were')} settled and "
            f"{'is' if queue.forgotten == 1 else 'are'} forgotten: only the counters of verdicts know of them"
        )
    if queue.dead:
        yield f"{count(queue.dead, 'record')} that no build can read in {keys.DEAD_LETTERS}"
    if said.last_seen is None:
        yield "no trainer has reported yet: nothing is trained before one does"
        return
    heard = span(look.now - said.last_seen)
    yield (
        f"the trainer, at step {said.step} and version {said.version}, is {said.state} "
        f"and waits for {said.waiting_for}; it said so {heard} ago"
    )
