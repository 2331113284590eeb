"""What a turn costs Redis, with the gateways' own writer on a real server: commands and bytes."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from bench.queue import own_redis
from bench.turns import EXPIRES_AT, OWNER, ending, specs, turns
from rollout_queue.redis.writer import RedisWriter

SESSIONS = 50
TURNS = 200
"""Of all sessions."""


@dataclass(frozen=True)
class RedisCost:
    """Means of a turn; the opening and the end of its session count too."""

    gateways: int
    requests: float
    """Commands that the gateways sent."""
    commands: float
    """Commands that Redis ran, those of scripts too."""
    received_bytes: float
    sent_bytes: float
    redis_us: float
    """CPU time of the commands, as Redis counts it."""
    by_name: Mapping[str, float]


async def cost_of_turns(gateways: int) -> RedisCost:
    """Each call of a session arrives at any of the gateways."""
    with own_redis() as server:
        clients = [Redis.from_url(server.url) for _ in range(gateways)]
        writers = [RedisWriter(client) for client in clients]
        observer = server.redis
        for writer in writers:  # loads the scripts
            await writer.load_for_call("none")
        given, draw = turns(0, TURNS), random.Random(0)
        observer.config_resetstat()
        for spec in specs(given):
            await draw.choice(writers).open_session(spec)
        for turn in given:
            writer = draw.choice(writers)
            await writer.load_for_call(turn.session_id)
            await writer.append_turn(turn, EXPIRES_AT, OWNER)
        for spec in specs(given):
            outcome, reward = ending(spec)
            writer = draw.choice(writers)
            await writer.append_reward(reward)
            await writer.append_outcome(outcome, reward, None)
        stats, whole = observer.info("commandstats"), observer.info("stats")
        for writer, client in zip(writers, clients, strict=True):
            await writer.close()
            await client.aclose()
    return _cost(gateways, stats, whole)


def _cost(gateways: int, stats: dict[str, Any], whole: dict[str, Any]) -> RedisCost:
    by_name = {
        name.removeprefix("cmdstat_"): found["calls"] / TURNS
        for name, found in stats.items()
        if name not in ("cmdstat_config|resetstat", "cmdstat_info", "cmdstat_hello")
    }
    outer = ("evalsha", "eval", "hgetall", "hmget", "hget", "script|load")
    scripts = {name: found for name, found in stats.items() if name in ("cmdstat_evalsha", "cmdstat_eval")}
    return RedisCost(
        gateways,
        requests=sum(found for name, found in by_name.items() if name in outer),
        commands=sum(by_name.values()),
        received_bytes=whole["total_net_input_bytes"] / TURNS,
        sent_bytes=whole["total_net_output_bytes"] / TURNS,
        redis_us=sum(found["usec"] for found in scripts.values()) / TURNS,
        by_name=dict(sorted(by_name.items(), key=lambda each: -each[1])),
    )


def redis_costs(gateways: int) -> RedisCost:
    return asyncio.run(cost_of_turns(gateways))
