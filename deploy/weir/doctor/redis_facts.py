"""Reads what Redis says of itself and of the training: by INFO, CONFIG GET, TIME and a few keys."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from rollout_queue import clock
from rollout_queue.contract.policies.policy import PolicyRecord
from rollout_queue.protocol.trainer import TrainerReport
from rollout_queue.redis import keys
from rollout_queue.redis.availability import refusal
from rollout_queue.redis.client.losses import recent_losses
from rollout_queue.redis.client.opening import open_async_redis
from weir.audit.sources import Sources
from weir.doctor.facts import RedisFacts
from weir.stack.settings import redis_access


async def read_redis(url: str, timeout_s: float) -> RedisFacts:
    """The facts. If Redis does not answer in time, they say so."""
    facts: dict[str, Any] = {"address": Sources(url, None).redis_address, "has_password": "@" in url}
    try:
        async with clock.timeout(timeout_s):
            redis = open_async_redis(redis_access(url), timeout_s)
            try:
                return await _read(redis, facts)
            finally:
                with suppress(RedisError, OSError):
                    await redis.aclose()
    except TimeoutError:
        return RedisFacts(**facts, silent=f"no answer within {timeout_s:g} s")
    except (RedisError, OSError, ValueError) as error:
        return RedisFacts(**facts, silent=str(error) or type(error).__name__, refused=refusal(error))


async def _read(redis: Redis, facts: Mapping[str, Any]) -> RedisFacts:
    before = clock.now()
    seconds, micros = await redis.time()
    after = clock.now()
    theirs = seconds + micros / 1e6
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.info()
        pipeline.hgetall(keys.TRAINER)
        pipeline.hgetall(keys.VERDICTS)
        pipeline.zrevrange(keys.SETTLED, 0, 0, withscores=True)
        pipeline.xlen(keys.STREAM)
        pipeline.xlen(keys.DEAD_LETTERS)
        pipeline.hvals(keys.POLICIES)
        pipeline.hgetall(keys.LOSSES)
        info, trainer, verdicts, settled, waiting, dead, policies, losses = await pipeline.execute()
    return RedisFacts(
        **facts,
        info=info,
        config=await _config(redis),
        clock_ahead_s=theirs - after if theirs > after else min(0.0, theirs - before),
        trainer=TrainerReport.of(trainer),
        verdicts={name.decode(): int(number) for name, number in verdicts.items()},
        settled_at=settled[0][1] / 1000 if settled else None,
        waiting=waiting,
        dead_letters=dead,
        losses=tuple(recent_losses(losses)),
        policies=len(policies),
        newest_policy_at=_newest(policies),
    )


async def _config(redis: Redis) -> Mapping[str, str] | None:
    """The configuration; None where `CONFIG` is not allowed."""
    try:
        found: Any = await redis.config_get("*")
    except ResponseError:
        return None
    return {_text(name): _text(value) for name, value in found.items()}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _newest(packed: list[bytes]) -> float | None:
    """When the newest version was registered."""
    with suppress(msgspec.DecodeError):
        return max((msgspec.json.decode(each, type=PolicyRecord).created_at for each in packed), default=None)
    return None
