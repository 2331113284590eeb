"""What a turn costs Redis, with the gateways' own writer on a real server: commands and bytes."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from bench.queue import own_redis
from bench.turns import EXPIRES_AT, OWNER, ending, specs, turns
from rollout_queue.redis.stream_writer import StreamWriter

TURNS = 2000
"""Of all sessions."""


@dataclass(frozen=True)
class RedisCost:
    """Means of a turn; the opening and the end of its session count too."""

    gateways: int
    commands: float
    """Commands that Redis ran, those of scripts too."""
    received_bytes: float
    sent_bytes: float
    redis_us: float
    """CPU time of Redis' process."""

    @property
    def cells(self) -> Sequence[str]:
        """The row of a table."""
        costs = (self.commands, self.received_bytes, self.sent_bytes, self.redis_us)
        return str(self.gateways), *(f"{cost:,.1f}" for cost in costs)


async def cost_of_turns(gateways: int) -> RedisCost:
    """Each call of a session arrives at any of the gateways."""
    with own_redis() as server:
        clients = [Redis.from_url(server.url) for _ in range(gateways)]
        writers = [StreamWriter(client) for client in clients]
        observer = server.redis
        for writer in writers:  # loads the scripts
            await writer.load_for_call("none")
        given, draw = turns(0, TURNS), random.Random(0)
        observer.config_resetstat()
        with server.measured("turns", TURNS):
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
    return _cost(gateways, stats, whole, server.median("turns").redis_us)


def _cost(gateways: int, stats: dict[str, Any], whole: dict[str, Any], redis_us: float) -> RedisCost:
    calls = {name.removeprefix("cmdstat_"): found["calls"] / TURNS for name, found in stats.items()}
    for name in ("config", "config|resetstat", "info", "client", "client|setinfo", "hello"):
        calls.pop(name, None)
    return RedisCost(
        gateways,
        commands=sum(calls.values()),
        received_bytes=whole["total_net_input_bytes"] / TURNS,
        sent_bytes=whole["total_net_output_bytes"] / TURNS,
        redis_us=redis_us,
    )


def redis_costs(gateways: int) -> RedisCost:
    return asyncio.run(cost_of_turns(gateways))
