"""How much is waiting downstream, as Redis and the trainer last said: read now and then, never per call."""

import msgspec
from redis.asyncio import Redis

from rollout_queue.protocol.trainer import TrainerReport
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.retention import forgotten_sessions

TRAINER_FIELDS = ("version", "rollouts_waiting", "rollouts_owed", "rollouts_per_step", "last_seen")


class TrainerBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer said of itself, as far as it concerns who may come in."""

    version: int
    rollouts_waiting: int
    """Ended, and not in a step yet."""
    rollouts_owed: int
    """In the weights, and not in a checkpoint yet: without a verdict, though nothing waits for them."""
    rollouts_per_step: float
    last_seen: float


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """One look downstream."""

    entries: int = 0
    used_bytes: int = 0
    max_bytes: int = 0
    """0 for a Redis without `maxmemory`."""
    sessions: int = 0
    """Ever opened."""
    trainer: TrainerBacklog | None = None
    """None until one has reported."""


async def read_pressure(redis: Redis) -> Pressure:
    """Raises StorageUnavailable."""
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.xlen(keys.STREAM)
        pipeline.info("memory")
        pipeline.zcard(keys.SESSIONS)
        pipeline.hgetall(keys.FORGOTTEN)
        pipeline.hmget(keys.TRAINER, TRAINER_FIELDS)
        entries, memory, sessions, forgotten, said = await stored(pipeline.execute())
    return Pressure(
        entries=entries,
        used_bytes=memory.get("used_memory", 0),
        max_bytes=memory.get("maxmemory", 0),
        sessions=sessions + forgotten_sessions(forgotten),
        trainer=_backlog(said),
    )


def _backlog(said: list[bytes | None]) -> TrainerBacklog | None:
    """None also for a trainer that says less than is needed, such as one of an older build."""
    fields = {
        name.encode(): value for name, value in zip(TRAINER_FIELDS, said, strict=True) if value is not None
    }
    try:
        return msgspec.convert(TrainerReport.of(fields), TrainerBacklog, from_attributes=True)
    except msgspec.ValidationError:
        return None
