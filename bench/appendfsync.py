"""The cost of `appendfsync always` and of `redis_wait_replicas`: the same appends, each time on a new Redis.

python -m bench.appendfsync [--turns N] [--agents 1 32 …]
"""

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from bench.processes import free_port, running
from bench.turns import EXPIRES_AT, specs, turns
from rollout_queue.contract.records import Turn
from rollout_queue.redis.settings import Replication
from rollout_queue.redis.stream_writer import StreamWriter
from weir.stack.service_process import executable

CASES = (("everysec", 0), ("always", 0), ("always", 1))
"""The policy, and how many replicas, which have the same policy, confirm each append."""


async def appended(url: str, given: list[Turn], agents: int, replicas: int) -> list[float]:
    """Append all turns, `agents` of them at a time. Returns the seconds of each append, sorted, and then the
    total seconds."""
    redis = Redis.from_url(url)
    while not await _answers(redis):  # noqa: ASYNC110 - another process has to come up
        await asyncio.sleep(0.02)
    await redis.flushall()
    writer = StreamWriter(redis, replication=Replication(replicas, 5.0))
    while not await _connected(redis, replicas):  # noqa: ASYNC110 - another process has to connect
        await asyncio.sleep(0.1)
    waiting, took = list(reversed(given)), list[float]()
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


async def _connected(redis: Redis, replicas: int) -> bool:
    found: dict[str, int] = await redis.info("replication")
    return found["connected_slaves"] >= replicas


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
    print("| appendfsync | replicas | agents | appends/s | p50 ms | p99 ms |\n|---|---|---|---|---|---|")
    for policy, replicas in CASES:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
            port = free_port()
            servers.enter_context(running(server(Path(folder) / "master", port, policy)))
            for number in range(replicas):
                command = server(Path(folder) / f"replica-{number}", free_port(), policy)
                servers.enter_context(running([*command, "--replicaof", "127.0.0.1", str(port)]))
            for agents in asked.agents:
                *took, whole = asyncio.run(appended(f"redis://127.0.0.1:{port}/0", given, agents, replicas))
                p50, p99 = (took[int(len(took) * share)] * 1e3 for share in (0.5, 0.99))
                row = (policy, replicas, agents, f"{len(took) / whole:.0f}", f"{p50:.2f}", f"{p99:.2f}")
                print("|", " | ".join(map(str, row)), "|")


def server(directory: Path, port: int, policy: str) -> list[str]:
    """The command of a Redis that keeps its file and its log in a new directory."""
    directory.mkdir()
    flags = f"--port {port} --bind 127.0.0.1 --appendonly yes --appendfsync {policy} --dir {directory}"
    quick = "--repl-diskless-sync yes --repl-diskless-sync-delay 0"
    log = str(directory / "redis.log")
    return [executable(), *flags.split(), *quick.split(), "--save", "", "--logfile", log]


if __name__ == "__main__":
    main()
