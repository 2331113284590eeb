"""Redis, examined by INFO, CONFIG GET, TIME and a few keys, and checked: whether it keeps what it has
answered, whether it has room, and who can reach it.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from rollout_queue import clock
from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.http.callers import LOOPBACK
from rollout_queue.protocol.conditions import NO_EVICTION, RedisUse, duration
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import refusal
from rollout_queue.redis.losses import recent_losses
from rollout_queue.redis.redis_client import open_async_redis
from weir.audit.audit_sources import Sources
from weir.doctor.deployment_facts import DeploymentFacts, Found, RedisFacts
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
        pipeline.hgetall(key_names.TRAINER)
        pipeline.hgetall(key_names.VERDICTS)
        pipeline.zrevrange(key_names.SETTLED, 0, 0, withscores=True)
        pipeline.xlen(key_names.STREAM)
        pipeline.xlen(key_names.DEAD_LETTERS)
        pipeline.hvals(key_names.POLICIES)
        pipeline.hgetall(key_names.LOSSES)
        info, trainer, verdicts, settled, waiting, dead, policies, losses = await pipeline.execute()
    return RedisFacts(
        **facts,
        info=info,
        config=await _read_config(redis),
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


async def _read_config(redis: Redis) -> Mapping[str, str] | None:
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


SLOW_REWRITE_S = 600
OLDEST = (6, 2)
MENDED = {
    "Redis": {(6, 2): 24, (7, 2): 16, (7, 4): 11, (8, 2): 10, (8, 4): 6, (8, 6): 7, (8, 8): 3, (8, 10): 2},
    "Valkey": {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1},
}
"""The release of each maintained line that has its last security fix (November 2026)."""


def redis_silent(facts: DeploymentFacts) -> Found:
    if facts.redis.silent is not None and facts.redis.refused is None:
        yield (
            "error",
            f"Redis at {facts.redis.address} does not answer: {facts.redis.silent}",
            "start Redis, or set WEIR_REDIS_URL; until then gateways refuse calls and the trainer waits",
        )


def redis_refuses(facts: DeploymentFacts) -> Found:
    if facts.redis.refused is not None:
        yield (
            "error",
            f"Redis at {facts.redis.address} runs, and does not let the doctor in: {facts.redis.refused}",
            "the services need the same: until then gateways refuse calls and the trainer waits",
        )


def redis_loses_data(facts: DeploymentFacts) -> Found:
    if _config(facts, "appendonly", "yes") == "no":
        yield (
            "error",
            "Redis writes no append-only file, so what it has answered is lost when it ends",
            "start it with queue/redis.conf, or set appendonly yes in its configuration",
        )


def redis_syncs_late(facts: DeploymentFacts) -> Found:
    policy = _config(facts, "appendfsync", "always")
    if policy != "always" and _config(facts, "appendonly", "yes") == "yes":
        lost = "up to two seconds of answers" if policy == "everysec" else "half a minute of answers"
        yield (
            "warning",
            f"Redis syncs its file {policy}, so a power cut may lose {lost} that agents have received",
            "set appendfsync always (queue/README.md compares the two)",
        )


def redis_lost_keys(facts: DeploymentFacts) -> Found:
    """The gateway tells the same as warnings, if it answers."""
    for said in facts.redis.losses if facts.system is None else ():
        yield (
            "warning",
            said,
            "docs/redis.md says what the loss of each key does; `weir audit` names what is lost",
        )


def redis_cannot_write(facts: DeploymentFacts) -> Found:
    for name, what in (
        ("aof_last_write_status", "could not write its append-only file"),
        ("aof_last_bgrewrite_status", "could not rewrite its append-only file, which grows until it can"),
    ):
        if facts.redis.info.get(name, "ok") != "ok":
            yield (
                "error",
                f"Redis {what} the last time",
                "free space on its disk and memory for its fork (vm.overcommit_memory 1), and read its log",
            )


def redis_rewrites_slowly(facts: DeploymentFacts) -> Found:
    seconds = int(facts.redis.info.get("aof_current_rewrite_time_sec", -1))
    if seconds > SLOW_REWRITE_S:
        yield (
            "warning",
            f"Redis has been rewriting its append-only file for {duration(seconds)}",
            "its disk is too slow for its size: move it to a faster disk, or lower gateway.retention_s",
        )


def redis_starts(facts: DeploymentFacts) -> Found:
    if int(facts.redis.info.get("loading", 0)):
        yield "warning", "Redis is reading its file, and refuses calls until it has", "wait"


def redis_is_replica(facts: DeploymentFacts) -> Found:
    if facts.redis.info.get("role") == "slave":
        yield (
            "error",
            f"{facts.redis.address} is a replica, which takes no writes",
            "name the primary in WEIR_REDIS_URL",
        )


def redis_is_old(facts: DeploymentFacts) -> Found:
    version = str(facts.redis.info.get("redis_version", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < OLDEST:
        yield "error", f"Redis {version} lacks commands that Weir uses", "install Redis 6.2 or newer"


def redis_lacks_fixes(facts: DeploymentFacts) -> Found:
    server, version = "Valkey", facts.redis.info.get("valkey_version")
    if version is None:
        server, version = "Redis", facts.redis.info.get("redis_version", "")
    numbers = tuple(int(part) for part in str(version).split(".") if part.isdigit())
    line, mended = numbers[:2], MENDED[server]
    if len(numbers) < 3 or line < OLDEST or line > max(mended):
        return
    if line not in mended:
        lacks = "gets no security fixes any more"
    elif numbers[2] < mended[line]:
        lacks = f"lacks the security fixes of {line[0]}.{line[1]}.{mended[line]}"
    else:
        return
    yield (
        "warning",
        f"{server} {version} {lacks}",
        "install a newer one (docs/redis.md), unless your distribution mends it under its old number",
    )


def redis_is_open(facts: DeploymentFacts) -> Found:
    bound = _config(facts, "bind", "127.0.0.1").split()
    open_to = [each for each in bound or ["*"] if each.lstrip("-") not in LOOPBACK]
    protected = _config(facts, "protected-mode", "yes") == "yes"
    if open_to and not protected and not facts.redis.has_password and _config(facts, "requirepass", "") == "":
        yield (
            "error",
            f"Redis listens on {' '.join(open_to)} without a password, for whoever reaches the port",
            "set requirepass and give the password in WEIR_REDIS_URL, or bind 127.0.0.1",
        )


def redis_hides_configuration(facts: DeploymentFacts) -> Found:
    if facts.redis.silent is None and facts.redis.config is None:
        yield (
            "warning",
            "this Redis does not allow CONFIG GET, so appendfsync and who can reach it could not be checked",
            "make sure by its own console that it has appendfsync always and a password",
        )


def redis_use(facts: DeploymentFacts) -> RedisUse | None:
    """What Redis says of its memory; None if it said nothing."""
    info = facts.redis.info
    if not info:
        return None
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    eviction = _config(facts, "maxmemory-policy", NO_EVICTION)
    # What replicas and the append-only file wait for does not count.
    beside = int(info.get("mem_not_counted_for_evict", 0))
    full = bool(most) and used - beside >= most and eviction == NO_EVICTION
    evicted = int(info.get("evicted_keys", 0))
    return RedisUse(used_bytes=used, max_bytes=most, full=full, evicted=evicted, eviction=eviction)


def _config(facts: DeploymentFacts, name: str, default: str) -> str:
    """A setting of Redis, which some are without CONFIG GET, too; `default`, with which no check finds
    anything, if it is not known."""
    told = {"maxmemory-policy": facts.redis.info.get("maxmemory_policy", default)}
    told["appendonly"] = "yes" if facts.redis.info.get("aof_enabled", 1) else "no"
    found: Any = (facts.redis.config or told).get(name, default)
    return str(found)


CHECKS = (
    redis_silent,
    redis_refuses,
    redis_loses_data,
    redis_syncs_late,
    redis_lost_keys,
    redis_cannot_write,
    redis_rewrites_slowly,
    redis_starts,
    redis_is_replica,
    redis_is_old,
    redis_lacks_fixes,
    redis_is_open,
    redis_hides_configuration,
)
