"""The cost of the queue: CPU per turn appended and read, a trainer's recovery, and Redis' memory.

python -m bench.queue [--turns N] [--pending N] [--sessions N] [--repetitions N]

turns ── StreamWriter, 64 in flight ──▶ Redis ──▶ StreamReader ──▶ Intake
      └─ redis-py, the same bytes ───▶       └─▶ redis-py

CPU is the CPU time of this process, as the scheduler counts it. Only one end of the queue works at a time.
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

from bench.gateway import REDIS
from bench.processes import cpu_s, free_port, running
from bench.turns import CONTEXT, EXPIRES_AT, OUTPUT, OWNER, VOCABULARY, ending, specs, turns
from rollout_queue.contract.codec import decode, encode
from rollout_queue.contract.records import SessionSpec, Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.redis.stream_writer import StreamWriter
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.entry_reader import READ_COUNT
from trainer_service.heartbeat import Heartbeat
from trainer_service.intake import Intake
from trainer_service.shared_state import SharedState
from trainer_service.storage.run_state import RunState
from trainer_service.trainer_metrics import TrainerMetrics
from weir.stack.service_process import executable

IN_FLIGHT = 64
BATCH = 10_000
"""How many synthetic turns are made at a time: few, so that they take little memory beside the trainer's."""

Item = TypeVar("Item")


class Cost(NamedTuple):
    """CPU microseconds per turn, in this process and in Redis, and the total seconds."""

    cpu_us: float
    redis_us: float
    wall_s: float


class MeasuredRedis:
    """A Redis server for one benchmark, and the costs measured on it."""

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

    def reader(self) -> StreamReader:
        """The reader of a new trainer. The lease of the previous one is deleted."""
        self.redis.delete(key_names.LEASE)
        lease = Lease(self.redis, 3600.0)
        lease.claim()
        return StreamReader(self.redis, lease.token)

    def used(self) -> int:
        """Bytes of the data in Redis, without the buffers of connections and of the append-only file."""
        time.sleep(2)  # Redis updates the size of its connections' buffers only now and then
        return int(self.redis.memory_stats()["dataset.bytes"])


@contextmanager
def own_redis() -> Iterator[MeasuredRedis]:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        place = ["--port", str(port), "--dir", folder, "--logfile", str(Path(folder) / "redis.log")]
        with running([executable(), *REDIS.split(" "), *place]) as pid:
            server = MeasuredRedis(port, pid)
            while True:
                try:
                    server.redis.ping()
                    break
                except RedisError:
                    time.sleep(0.05)
            yield server


async def in_flight(items: Sequence[Item], each: Callable[[Item], Awaitable[object]]) -> None:
    """Keep `IN_FLIGHT` calls in flight, like a busy gateway."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await each(item)

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


@contextmanager
def loop_of(server: MeasuredRedis) -> Iterator[tuple[asyncio.Runner, AsyncRedis]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        redis = AsyncRedis.from_url(server.url)
        yield runner, redis
        runner.run(redis.aclose())


def append_ours(server: MeasuredRedis, given: list[Turn], name: str) -> None:
    """Record turns with the gateway's writer, while it has the heads of their sessions in its cache."""
    with loop_of(server) as (runner, redis):
        writer = StreamWriter(redis)
        runner.run(in_flight(specs(given), writer.open_session))
        runner.run(in_flight(specs(given), lambda spec: writer.load_for_call(spec.session_id)))
        with server.measured(name, len(given)):
            runner.run(in_flight(given, lambda turn: writer.append_turn(turn, EXPIRES_AT, OWNER)))
        runner.run(writer.close())


def append_raw(server: MeasuredRedis, given: list[Turn], name: str, together: int) -> None:
    """Append the same bytes, encoded beforehand, to stream and hash, `together` turns in each pipeline."""
    ready = [(key_names.session(turn.session_id), f"t:{turn.turn_id}", encode(turn)) for turn in given]
    parts = [ready[start : start + together] for start in range(0, len(ready), together)]
    with loop_of(server) as (runner, redis):

        async def append(part: Sequence[tuple[str, str, bytes]]) -> None:
            async with redis.pipeline(transaction=True) as pipeline:
                for key, field, packed in part:
                    pipeline.xadd(key_names.STREAM, {b"r": packed})
                    pipeline.hset(key, field, packed)
                await pipeline.execute()

        with server.measured(name, len(given)):
            runner.run(in_flight(parts, append))


def read_ours(server: MeasuredRedis, count: int, name: str) -> None:
    """Read turns with the trainer's reader."""
    reader, left = server.reader(), count
    with server.measured(name, count):
        while left:
            left -= len(reader.read(READ_COUNT, 0.01))


def read_raw(server: MeasuredRedis, count: int, name: str) -> None:
    """Read the bytes without decoding them and without a check of the lease."""
    server.redis.xgroup_create(key_names.STREAM, "raw", "0")
    left = count
    with server.measured(name, count):
        while left:
            found: Any = server.redis.xreadgroup("raw", "one", {key_names.STREAM: ">"}, READ_COUNT)
            left -= len(found[0][1])


def ends(server: MeasuredRedis, count: int, repetitions: int) -> None:
    """Measure writer, reader and redis-py alternately, because the speed of a machine changes."""
    given = turns(0, count)
    packed = [encode(turn) for turn in given]
    gc.freeze()  # a gateway does not hold these objects, so the garbage collector must not visit them here
    for _ in range(repetitions):
        server.redis.flushall()
        append_raw(server, given, "redis-py: MULTI XADD HSET EXEC", 1)
        server.redis.flushall()
        append_raw(server, given, f"redis-py: the same, {IN_FLIGHT} turns in one MULTI", IN_FLIGHT)
        server.redis.flushall()
        append_ours(server, given, "`StreamWriter.append_turn`")
        with server.measured("of it `encode`", count):
            for turn in given:
                encode(turn)
        read_raw(server, count, "redis-py: XREADGROUP, the bytes alone")
        read_ours(server, count, "`StreamReader.read`, decoded and checked")
        with server.measured("of it `decode`", count):
            for each in packed:
                decode(each)
    size = sum(map(len, packed)) / count
    print(f"\n{count} turns of {CONTEXT} + {OUTPUT} tokens, {size:.0f} bytes, {IN_FLIGHT} in flight:\n")
    print("| | CPU µs/turn | at best | of Redis | turns/s |\n|---|---|---|---|---|")
    for name, found in server.costs.items():
        cost, best_us = server.median(name), min(each.cpu_us for each in found)
        cells = f"{cost.cpu_us:.1f} | {best_us:.1f} | {cost.redis_us:.1f} | {count / cost.wall_s:.0f}"
        print(f"| {name} | {cells} |")


def recovery(server: MeasuredRedis, count: int) -> None:
    """Measure the start of a trainer after the last one died with turns of open sessions in its memory."""
    server.redis.flushall()
    for first in range(0, count, BATCH):
        append_ours(server, turns(first, min(BATCH, count - first)), "filling")
    read_ours(server, count, "filling")
    reader = server.reader()
    intake = Intake(
        stream=reader,
        algorithm=AlgorithmSettings(),
        vocab_size=VOCABULARY,
        heartbeat=Heartbeat(reader, SharedState(), retry_s=1.0),
        metrics=TrainerMetrics(CollectorRegistry(), []),
    )
    with server.measured("reads them again", count):
        intake.resume(RunState())
    with server.measured("looks for its next step", count):
        intake.read()
        intake.select(7, AlgorithmSettings())
    print(f"\n| a trainer after {count} pending turns | s | CPU s | of Redis |\n|---|---|---|---|")
    for name in ("reads them again", "looks for its next step"):
        cost = server.median(name)
        cpu_s_, redis_s = cost.cpu_us * count / 1e6, cost.redis_us * count / 1e6
        print(f"| {name} | {cost.wall_s:.2f} | {cpu_s_:.2f} | {redis_s:.2f} |")


def memory(server: MeasuredRedis, sessions: int) -> None:
    """What sessions of four turns add to Redis' memory, and how much the verdicts free (below 0)."""
    server.redis.flushall()
    given = turns(0, 4 * sessions)
    made, started = specs(given), server.used()
    print(f"\n| {sessions} sessions | bytes each |\n|---|---|")

    def say(what: str, count: int) -> None:
        nonlocal started
        now = server.used()
        print(f"| {what} | {(now - started) / count:.0f} |")
        started = now

    with loop_of(server) as (runner, redis):
        writer = StreamWriter(redis)
        runner.run(in_flight(made, writer.open_session))
        say("a session, opened in its group", sessions)
        runner.run(in_flight(given, lambda turn: writer.append_turn(turn, EXPIRES_AT, OWNER)))
        say("a turn: its entry, its field of the head, the keys that find it", len(given))
        runner.run(in_flight(made, lambda spec: writer.append_outcome(*ending(spec), None)))
        say("a session's reward and outcome", sessions)
        runner.run(writer.close())
        runner.run(redis.connection_pool.disconnect())
    entries = server.redis.memory_usage(key_names.STREAM, 0) or 0
    key = key_names.session(made[0].session_id)
    print(f"| MEMORY USAGE of the stream, a turn's part | {entries / len(given):.0f} |")
    print(f"| MEMORY USAGE of a head with its four turns | {server.redis.memory_usage(key, 0) or 0:.0f} |")
    settle(server, made, given)
    say("acknowledged with verdicts and trimmed, a turn", len(given))


def settle(server: MeasuredRedis, made: Sequence[SessionSpec], given: Sequence[Turn]) -> None:
    reader, trained = server.reader(), Verdict(code="trained", step=1, version=1)
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
    with own_redis() as server:
        ends(server, asked.turns, asked.repetitions)
        recovery(server, asked.pending)
        memory(server, asked.sessions)


if __name__ == "__main__":
    main()
