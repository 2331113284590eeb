"""How much waits downstream, in Redis and at the trainer: read at every poll, never per call."""

import msgspec
from redis.asyncio import Redis

from rollout_queue.protocol.trainer import TrainerReport
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.retention import forgotten_sessions

TRAINER_FIELDS = ("version", "rollouts_waiting", "rollouts_owed", "rollouts_per_step", "last_seen")


class TrainerBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the trainer's report that admission needs."""

    version: int
    rollouts_waiting: int
    """Rollouts that have ended and are in no step yet."""
    rollouts_owed: int
    """Rollouts that are in the weights, but in no checkpoint: without a verdict, though they do not wait."""
    rollouts_per_step: float
    last_seen: float


class Backpressure(msgspec.Struct, frozen=True, kw_only=True):
    """The state downstream at one poll."""

    entries: int = 0
    used_bytes: int = 0
    max_bytes: int = 0
    """0 for a Redis without `maxmemory`."""
    sessions: int = 0
    """Sessions that were ever opened."""
    trainer: TrainerBacklog | None = None
    """None until a trainer has reported."""


async def read_backpressure(redis: Redis) -> Backpressure:
    """Raises StorageUnavailable."""
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.xlen(keys.STREAM)
        pipeline.info("memory")
        pipeline.zcard(keys.SESSIONS)
        pipeline.hgetall(keys.FORGOTTEN)
        pipeline.hmget(keys.TRAINER, TRAINER_FIELDS)
        entries, memory, sessions, forgotten, report = await stored(pipeline.execute())
    return Backpressure(
        entries=entries,
        used_bytes=memory.get("used_memory", 0),
        max_bytes=memory.get("maxmemory", 0),
        sessions=sessions + forgotten_sessions(forgotten),
        trainer=_backlog(report),
    )


def _backlog(report: list[bytes | None]) -> TrainerBacklog | None:
    """The trainer's backlog; None if its report lacks a field, such as that of an older build."""
    fields = {
        name.encode(): value for name, value in zip(TRAINER_FIELDS, report, strict=True) if value is not None
    }
    try:
        return msgspec.convert(TrainerReport.of(fields), TrainerBacklog, from_attributes=True)
    except msgspec.ValidationError:
        return None
