"""Reads how many sessions are at each stage between opening and verdict, and what they wait for.

open ─▶ waiting_reward ─▶ ended (its group is not complete: group_incomplete; else: ready) ─▶ a verdict

The work of one reading is bounded, however many sessions there are. Redis counts verdicts when they are given
(`weir:verdicts`). Only sessions that may still expire need action. Of these, the `MAX_SESSIONS` that expire
first are read. Requests within `SHARED_S` seconds of a reading share its report.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from gateway.operators.pipeline_report import (
    IncompleteGroup,
    PipelineReport,
    PipelineSnapshot,
    QueueCounts,
    report_of,
)
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.progress import GroupProgress, SessionProgress
from rollout_queue.protocol.trainer import TrainerReport
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.progress import progress_of
from rollout_queue.redis.retention import forgotten_sessions

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
    names = await stored(redis.zrange(keys.DEADLINES, 0, MAX_SESSIONS - 1, withscores=True))
    expires_at = {name.decode(): float(at) for name, at in names}
    found = await progress_of(redis, list(expires_at))
    return PipelineSnapshot(clock.now(), queue, found, expires_at, await _incomplete(redis, found))


async def _queue(redis: Redis) -> QueueCounts:
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
    return QueueCounts(
        sessions=sessions + forgotten,
        timed=timed,
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
            pipeline.hget(keys.group(group_id), "size")
            pipeline.scard(keys.group_members(group_id))
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
