"""What Redis does after a checkpoint of very many turns: how long a script takes, and what a kill loses.

python -m bench.owed [--turns N] [--kills N] [--server PROGRAM …]

a trainer with N owed turns ─▶ kill -9 between two pages of its acknowledgement ─▶ the next one, … ─▶ counts
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.exceptions import RedisError

from bench.processes import free_port, module, running
from rollout_queue.contract.packed_tokens import TrainedTokens
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Verdict
from rollout_queue.redis import key_names
from rollout_queue.redis.consumer_scripts import ACKNOWLEDGE, FREE
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.lua import Script
from rollout_queue.redis.stream_reader import StreamReader
from trainer_service.groups.acknowledgement import AcknowledgedTurn, Acknowledgement
from trainer_service.heartbeat import Heartbeat
from trainer_service.intake import Acknowledger
from trainer_service.shared_state import SharedState
from trainer_service.trainer_metrics import TrainerMetrics
from weir.stack.service_process import CONFIGURATION, executable

TURNS_A_SESSION = 20
STARTS_WITHIN_S = 30.0
RECORD = bytes(300)
PLANT = Script[None]("""
-- KEYS: stream, session   ARGV: first turn, how many, record
redis.call('HSET', KEYS[2], 'spec', '')
for turn = ARGV[1], ARGV[1] + ARGV[2] - 1 do
    redis.call('HSET', KEYS[2], string.format('t:t%d', turn), ARGV[3])
    redis.call('XADD', KEYS[1], string.format('%d-1', turn + 1), 'r', ARGV[3])
end
""")
DELIVER = Script[None]("""
-- KEYS: stream   ARGV: group, consumer
return #redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1000, 'STREAMS', KEYS[1], '>')[1][2]
""")


class Found(NamedTuple):
    """What Redis holds, and what its log of slow commands says."""

    pending: int
    left: int
    """Entries in the stream: one, the last delivered one, once all are acknowledged."""
    trained: int
    sessions: int
    steps: int
    scripts: int
    slowest_ms: float
    """By Redis' log of slow commands, so with the time in which Redis had no core; 0 for less than 1 ms."""

    def check(self, turns: int) -> None:
        """Raises SystemExit if something is lost, or counted twice."""
        counts = self.pending, self.left, self.trained, self.sessions, self.steps
        if counts != (0, 1, turns, turns // TURNS_A_SESSION, 1):
            raise SystemExit(f"something is lost, or counted twice: {self}")


@contextmanager
def server(program: str, folder: Path) -> Iterator[tuple[str, int]]:
    port = free_port()
    place = ["--port", str(port), "--dir", str(folder), "--logfile", str(folder / "redis.log")]
    slow = ["--slowlog-log-slower-than", "1000", "--slowlog-max-len", "100000"]  # µs
    slow += ["--auto-aof-rewrite-percentage", "0"]  # its fork would count as time of a script
    command = [program, str(CONFIGURATION), *place, *slow, "--appendfsync", "everysec"]
    with running(command, ends_within_s=60) as pid:
        url, until = f"redis://127.0.0.1:{port}/0", time.monotonic() + STARTS_WITHIN_S
        while True:
            try:
                Redis.from_url(url).ping()
                break
            except RedisError:
                if time.monotonic() > until:
                    raise SystemExit(f"{program} does not answer") from None
                time.sleep(0.05)
        yield url, pid


def plant(redis: Redis, turns: int) -> Acknowledgement:
    """Write sessions whose entries the trainer has read. Returns what a checkpoint of one step owes."""
    redis.xgroup_create(key_names.STREAM, key_names.GROUP, "0", mkstream=True)
    verdict = Verdict(code="trained", step=1, version=1)
    sessions = {f"s{number}": verdict for number in range(turns // TURNS_A_SESSION)}
    with redis.pipeline(transaction=False) as pipeline:
        for number, name in enumerate(sessions):
            first = number * TURNS_A_SESSION
            named = [key_names.STREAM, key_names.session(name)]
            PLANT.queue(pipeline, named, [first, TURNS_A_SESSION, RECORD])
            if number % 500 == 499:
                pipeline.execute()
        pipeline.execute()
    for _ in range(0, turns, 1000):
        DELIVER.run_now(redis, [key_names.STREAM], [key_names.GROUP, key_names.CONSUMER])
    owned = [f"s{turn // TURNS_A_SESSION}" for turn in range(turns)]
    tokens = TrainedTokens(240).pack()
    owed = [AcknowledgedTurn(name, f"t{turn}", verdict, tokens) for turn, name in enumerate(owned)]
    entry_ids = [f"{turn + 1}-1" for turn in range(turns)]
    return Acknowledgement(
        entry_ids, sessions, owed, [TrainedStep(1, 1, 0, turns, len(sessions), 240 * turns)]
    )


def found(redis: Redis) -> Found:
    slow: Any = redis.execute_command("SLOWLOG", "GET", 100_000)  # type: ignore[no-untyped-call]
    names = {script.sha.encode() for script in (ACKNOWLEDGE, FREE)}
    took = [duration for _, _, duration, command, *_ in slow if names.intersection(command)]
    counts: Any = redis.hgetall(key_names.VERDICTS)
    pending: Any = redis.xpending(key_names.STREAM, key_names.GROUP)
    return Found(
        pending["pending"],
        redis.xlen(key_names.STREAM),
        int(counts.get(b"turn:trained", 0)),
        int(counts.get(b"session:trained", 0)),
        redis.zcard(key_names.STEPS),
        script_calls(redis),
        max(took, default=0) / 1000,
    )


class MeasuredRedis(Redis):
    """Knows the most CPU seconds that one script took of Redis' main thread."""

    pid, most_s = 0, 0.0

    def evalsha(self, *given: Any) -> Any:
        before = main_thread_s(self.pid)
        reply = super().evalsha(*given)
        self.most_s = max(self.most_s, main_thread_s(self.pid) - before)
        return reply


def main_thread_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def trainer(url: str, checkpoint: Path, pid: int) -> None:
    """A trainer that starts from this checkpoint, and only acknowledges. Redis has this process id."""
    redis: Any = MeasuredRedis.from_url(url)
    redis.pid = pid
    lease = Lease(redis, 30.0)
    redis.delete(key_names.LEASE)
    lease.claim()
    stream = StreamReader(redis, lease.token, lease.renew)
    heartbeat, metrics = Heartbeat(stream, SharedState(), 0.1), TrainerMetrics(CollectorRegistry())
    owed = msgspec.msgpack.decode(checkpoint.read_bytes(), type=Acknowledgement)
    pending: Any = redis.xpending_range(key_names.STREAM, key_names.GROUP, "-", "+", 1)
    Acknowledger(stream, heartbeat, metrics).resume(owed, {each["message_id"].decode() for each in pending})
    checkpoint.with_suffix(".cpu").write_text(str(redis.most_s))


def acknowledge(redis: Redis, command: list[str], kills: int) -> float:
    """Start trainers; kill all but the last one when a further part is acknowledged. Returns the seconds of
    the last one."""
    sent = script_calls(redis)
    for _ in range(kills):
        process = subprocess.Popen(command)
        before = sent
        while (sent := script_calls(redis)) < before + 5 and process.poll() is None:
            time.sleep(0.002)
        process.kill()
        process.wait()
    began = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - began


def script_calls(redis: Redis) -> int:
    stats: Any = redis.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


def measure(program: str, turns: int, kills: int) -> Found:
    with tempfile.TemporaryDirectory() as folder, server(program, Path(folder)) as (url, pid):
        redis, checkpoint = Redis.from_url(url), Path(folder) / "owed"
        checkpoint.write_bytes(msgspec.msgpack.encode(plant(redis, turns)))
        redis.slowlog_reset()
        redis.config_resetstat()
        took_s = acknowledge(redis, module("bench.owed", "--trainer", url, checkpoint, pid), kills)
        most_ms = 1000 * float(checkpoint.with_suffix(".cpu").read_text())
        result = found(redis)
        version = redis.info("server")["redis_version"]
        name = f"{Path(program).parent.name} {version}"
        took = f"{most_ms:.1f} | {result.slowest_ms:.1f} | {took_s:.1f}"
        print(f"| {name} | {turns:,} | {kills} | {result.scripts:,} | {took} |", flush=True)
    result.check(turns)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=1_000_000, help="a multiple of 20")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--server", nargs="+", default=[executable()], help="programs of Redis or Valkey")
    parser.add_argument("--trainer", nargs=3, metavar=("URL", "CHECKPOINT", "PID"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.trainer:
        trainer(asked.trainer[0], Path(asked.trainer[1]), int(asked.trainer[2]))
        return
    print("| server | turns | kills | scripts | most CPU ms | slowest ms | last trainer s |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for program in asked.server:
        measure(program, asked.turns, asked.kills)


if __name__ == "__main__":
    main()
