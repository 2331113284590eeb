"""Reads the backpressure: how much work waits behind the gateway, in Redis and at the trainer.

The gateway reads it at every poll, never per call. Where too much waits, new sessions are refused:
the trainer drops stale rollouts.

staleness, in versions = rollouts ahead of it ÷ rollouts per step + versions by which the engines lag
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.callers.caller_limits import DEFAULT_RETRY_S, StepTrend, limit_reached, retry_after_s
from gateway.errors import LimitReached
from rollout_queue import clock
from rollout_queue.protocol.conditions import (
    LESS_IN_REDIS,
    NO_EVICTION,
    TRAINER_SILENT_S,
    ConditionFacts,
    RedisUse,
    redis_full,
    redis_unbounded,
)
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.session_retention import forgotten_sessions

TRAINER_FIELDS = (
    "version",
    "rollouts_waiting",
    "rollouts_owed",
    "rollouts_per_step",
    "max_row_tokens",
    "last_seen",
    "state",
    "refuses_training",
)


class TrainerBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the trainer's report that admission needs."""

    version: int
    rollouts_waiting: int
    """Rollouts that have ended, and that no training step has used yet."""
    rollouts_owed: int
    """Rollouts that were trained, but are in no checkpoint yet. They have no verdict, and need no step."""
    rollouts_per_step: float
    max_row_tokens: int | None = None
    """Rollouts with longer rows are not trained."""
    last_seen: float
    state: str | None = None
    refuses_training: bool | None = None
    """Whether it wants no sessions for training: it is paused, and set to refuse them."""

    @property
    def busy(self) -> bool:
        """Whether it makes a step, or publishes one. An older trainer does not say, and counts as busy."""
        return self.state in (None, "training", "publishing")

    @property
    def paused(self) -> bool:
        """Whether it is alive and paused: then it reads on, and makes no step."""
        return self.state == "paused" and clock.now() - self.last_seen <= TRAINER_SILENT_S


class Backpressure(msgspec.Struct, frozen=True, kw_only=True):
    """How much waited at one poll."""

    entries: int = 0
    """Records in the stream for the trainer."""
    dead: int = 0
    """Records that the trainer could not read."""
    unfinished: int = 0
    """Sessions that may still expire: they have no verdict."""
    used_bytes: int = 0
    max_bytes: int = 0
    """0 for a Redis without `maxmemory`."""
    full: bool = False
    """Whether Redis refused writes for want of memory."""
    evicted: int = 0
    """How many keys Redis has removed for want of memory since it started."""
    eviction: str = NO_EVICTION
    """Redis' maxmemory-policy."""
    sessions: int = 0
    """How many sessions were ever opened."""
    trainer: TrainerBacklog | None = None
    """None until a trainer has reported."""

    @property
    def redis(self) -> RedisUse:
        """What operators are told of Redis' memory by."""
        return RedisUse(
            used_bytes=self.used_bytes,
            max_bytes=self.max_bytes,
            full=self.full,
            evicted=self.evicted,
            eviction=self.eviction,
        )


def memory_bound(pressure: Backpressure) -> str:
    """How much memory Redis may use, as a sentence."""
    if unbounded := redis_unbounded(_facts(pressure)):
        return unbounded
    return f"Redis uses {pressure.used_bytes / 2**20:.0f} of {pressure.max_bytes / 2**20:.0f} MiB (maxmemory)"


async def read_backpressure(redis: Redis) -> Backpressure:
    """Raises StorageUnavailable."""
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.xlen(key_names.STREAM)
        pipeline.info("memory")
        pipeline.zcard(key_names.SESSIONS)
        pipeline.hgetall(key_names.FORGOTTEN)
        pipeline.hmget(key_names.TRAINER, TRAINER_FIELDS)
        pipeline.xlen(key_names.DEAD_LETTERS)
        pipeline.zcard(key_names.DEADLINES)
        pipeline.info("stats")
        found = await stored(pipeline.execute())
    entries, memory, sessions, forgotten, report, dead, unfinished, stats = found
    return Backpressure(
        entries=entries,
        dead=dead,
        unfinished=unfinished,
        used_bytes=memory.get("used_memory", 0),
        max_bytes=memory.get("maxmemory", 0),
        full=_full(memory),
        evicted=stats.get("evicted_keys", 0),
        eviction=memory.get("maxmemory_policy", NO_EVICTION),
        sessions=sessions + forgotten_sessions(forgotten),
        trainer=_backlog(report),
    )


def _full(memory: Mapping[str, Any]) -> bool:
    """Whether Redis refuses writes. What replicas and the append-only file wait for does not count."""
    most = memory.get("maxmemory", 0)
    used = memory.get("used_memory", 0) - memory.get("mem_not_counted_for_evict", 0)
    return bool(most) and used >= most and memory.get("maxmemory_policy", NO_EVICTION) == NO_EVICTION


def full_redis(pressure: Backpressure) -> str | None:
    """That Redis was full at the last poll, as a sentence; None if it was not."""
    full = redis_full(_facts(pressure))
    return f"{full}: {LESS_IN_REDIS}" if full else None


def _facts(pressure: Backpressure) -> ConditionFacts:
    return ConditionFacts(now=clock.now(), redis=pressure.redis)


def _backlog(report: list[bytes | None]) -> TrainerBacklog | None:
    """The trainer's backlog; None without a report, or if the report of an older trainer lacks a field."""
    fields = {
        name.encode(): value for name, value in zip(TRAINER_FIELDS, report, strict=True) if value is not None
    }
    try:
        return msgspec.convert(TrainerReport.of(fields), TrainerBacklog, from_attributes=True)
    except msgspec.ValidationError:
        return None


@dataclass(frozen=True)
class StalenessBudget:
    """The greatest permitted staleness, `versions`, and what a session's staleness depends on."""

    versions: int
    trainer: TrainerBacklog
    serving: int
    """The version that would sample the session now."""

    @property
    def lag(self) -> int:
        """Versions by which the engines are behind the trainer."""
        return max(0, self.trainer.version - self.serving)

    @property
    def room(self) -> int:
        """How many rollouts may be ahead of a new one.

        A rollout behind k others is trained k // rollouts_per_step steps from now. Its staleness is then that
        number plus the lag at its start. Without lag, the room is AReaL's capacity (arXiv 2505.24298).
        """
        return max(0, math.floor((self.versions - self.lag + 1) * self.trainer.rollouts_per_step))

    @property
    def bound(self) -> int:
        """The room, for a count of sessions without a verdict: that count includes the `rollouts_owed`."""
        return self.room + self.trainer.rollouts_owed

    @property
    def used_up(self) -> bool:
        """Whether the rollouts that wait for training fill the room already."""
        return self.trainer.rollouts_waiting >= self.room

    def refusal(self, ahead: int, pace: StepTrend) -> LimitReached:
        """The error for too many rollouts `ahead`; `pace` says how long a step takes."""
        silent_s = clock.now() - self.trainer.last_seen
        message = (
            f"a session opened now would be trained too late for gateway.limits.staleness_versions "
            f"{self.versions}: {ahead} rollouts are ahead of it, the trainer takes "
            f"{self.trainer.rollouts_per_step:g} a step, and the engines serve version {self.serving} while "
            f"the trainer is at {self.trainer.version}"
        )
        if silent_s > DEFAULT_RETRY_S:
            message += f". The trainer last reported {silent_s:.0f} s ago"
        message += ". Sessions with train: false are admitted"
        if self.lag > self.versions:  # no step helps: the engines need newer weights first
            return limit_reached("staleness_budget", message, DEFAULT_RETRY_S)
        steps = max(1.0, (ahead - self.room + 1) / self.trainer.rollouts_per_step)
        return limit_reached("staleness_budget", message, retry_after_s(pace.seconds_to_move(steps)))
