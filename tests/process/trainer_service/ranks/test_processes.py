"""Trainer processes: two ranks publish in shares, one of two trainers reads, and one waits for memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import yaml
from redis import Redis

from rollout_queue.contract.codec import encode
from rollout_queue.contract.published_policy import STABLE
from rollout_queue.contract.records import Outcome
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import LOST, Holder
from tests.support.gateway.running import ADMIN_KEY
from tests.support.long_cases import cases
from tests.support.redis_clients import redis_at
from tests.support.rollout_server.in_process import memory_sharing, server_thread
from tests.support.serving import free_port, serving
from tests.support.trainer_service.harness import FakeGateway
from tests.support.trainer_service.over_http import over_http
from tests.support.trainer_service.rank_pair import RankPair
from tests.support.trainer_service.rank_tasks import Program
from tests.support.trainer_service.redis_agents import RedisAgents
from tests.support.waiting import wait_until
from weir.stack.services import launcher

STARTS_WITHIN_S = 400.0
Ranks = tuple[Callable[[], object], Callable[[], object]]
"""What tells the ranks to stop, and what waits for their end. The latter asserts that they have done so in
order."""


@contextmanager
def launched(config: Path) -> Iterator[Ranks]:
    """As `weir up` starts them."""
    command = [sys.executable, *launcher(2), "-m", "trainer_service", "--config", str(config)]
    path = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}) as process:
        try:
            yield process.terminate, lambda: process.wait(STARTS_WITHIN_S)
        finally:
            if process.poll() is None:
                for worker in psutil.Process(process.pid).children(recursive=True):
                    worker.kill()
            process.kill()


@contextmanager
def forked(pair: RankPair, config: Path) -> Iterator[Ranks]:
    """With the variables that the launcher sets. Each gets the signal, as from the launcher."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given = ["--config", str(config)]
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    place = pair.run([Program(common | each, config.parent / f"log-{each['RANK']}", given) for each in own])

    def terminate() -> None:
        for rank in pair.ranks(place):
            rank.terminate()

    def ended() -> None:
        assert pair.ended(place) == [0, 0]

    try:
        yield terminate, ended
    finally:
        if not pair.has_ended(place):
            for rank in pair.ranks(place):
                rank.kill()


@pytest.mark.parametrize("by_launcher", cases([False], long=[True]))
def test_two_rank_processes_publish_in_shares_and_end_when_told(
    pair: RankPair, tmp_path: Path, model_path: Path, redis_url: str, by_launcher: bool
) -> None:
    gateway, policies = FakeGateway(), tmp_path / "policies"
    with redis_at(redis_url) as redis, serving(over_http(gateway)) as url:
        redis.flushdb()
        trainer: dict[str, Any] = {
            "model_path": str(model_path),
            "redis_url": redis_url,
            "gateway_url": url,
            "checkpoint_dir": str(tmp_path / "checkpoints"),
            "policies_dir": str(policies),
            "metrics_path": None,
            "port": free_port(),
            "threads": 1,
            "device": "cpu",
            "algorithm": {"min_live_rows": 2},
            # The logprobs of these agents are invented, so that these guards would always alarm.
            "guards": {"max_abs_logp": None, "max_kl": None},
        }
        config = tmp_path / "weir.yaml"
        config.write_text(yaml.safe_dump({"trainer": trainer}))
        RedisAgents(redis_url).group("g", [1.0, 0.0])
        with launched(config) if by_launcher else forked(pair, config) as (terminate, ended):
            wait_until(lambda: gateway.announced, STARTS_WITHIN_S)
            assert [body["version"] for body in gateway.announced] == [1]
            terminate()
            ended()
    version = policies / "v00000001"
    assert (version / STABLE).exists()
    assert sorted(path.name for path in version.glob("*.safetensors")) == [
        f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)
    ]
    assert [path.name for path in policies.iterdir()] == [version.name]


# Several trainers, by mistake or after a sleep, and a device that is shared


LEASE_S = 8.0
"""A busy machine may let a process wait for seconds, and its lease must outlast that."""


class Process:
    """`python -m trainer_service`, forked, with a checkpoint directory of its own."""

    def __init__(
        self, pair: RankPair, directory: Path, name: str, model_path: Path, redis_url: str, **more: str
    ) -> None:
        self.checkpoints = directory / name / "checkpoints"
        self.log, self.port = directory / f"{name}.log", free_port()
        settings = {
            "WEIR_REDIS_URL": redis_url,
            "WEIR_MODEL_PATH": str(model_path),
            "WEIR_TRAINER__CHECKPOINT_DIR": str(self.checkpoints),
            "WEIR_TRAINER__POLICIES_DIR": str(directory / name / "policies"),
            "WEIR_TRAINER__PORT": str(self.port),
            "WEIR_TRAINER__LEASE_S": str(LEASE_S),
            "WEIR_TRAINER__THREADS": "1",
            "WEIR_TRAINER__DEVICE": "cpu",
            **more,
        }
        self._pair = pair
        self._place = pair.run([Program(settings, self.log)])
        (self._process,) = pair.ranks(self._place)
        self.pid = self._process.pid

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def ends(self) -> int:
        (status,) = self._pair.ended(self._place)
        return status

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if not self._pair.has_ended(self._place):
            self._process.kill()
            self.ends()

    def takes_up_the_stream(self) -> None:
        wait_until(lambda: "pending entries" in self.said or self._pair.has_ended(self._place))
        assert not self._pair.has_ended(self._place), self.said


Start = Callable[..., Process]


@pytest.fixture
def start(pair: RankPair, tmp_path: Path, model_path: Path, redis: Redis, redis_url: str) -> Iterator[Start]:
    started: list[Process] = []

    def begin(name: str, **more: str) -> Process:
        started.append(Process(pair, tmp_path, name, model_path, redis_url, **more))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def holder(redis: Redis) -> int | None:
    """The pid of the process that holds the lease."""
    packed: Any = redis.get(key_names.LEASE)
    return msgspec.json.decode(packed, type=Holder).pid if packed else None


def pending(redis: Redis) -> int:
    summary: Any = redis.xpending(key_names.STREAM, key_names.GROUP)
    return int(summary["pending"])


def append(redis: Redis, session_id: str) -> None:
    """A session that ends without reward: the trainer holds its entry, and never acknowledges it."""
    record = Outcome(session_id=session_id, status="completed", created_at=time.time())
    redis.hset(key_names.session(session_id), "spec", b"")
    redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: encode(record)})


def test_of_two_trainers_one_refuses_and_one_that_slept_ends(start: Start, redis: Redis) -> None:
    first, second = start("first"), start("second")
    wait_until(lambda: holder(redis))
    if holder(redis) == second.pid:
        first, second = second, first
    assert second.ends() == 1
    assert f"another trainer holds {key_names.LEASE}: " in second.said
    assert f":{first.pid}, since " in second.said
    assert "Traceback" not in second.said
    first.takes_up_the_stream()
    append(redis, "before")
    wait_until(lambda: pending(redis) == 1)

    first.signal(signal.SIGSTOP)
    third = start("third")
    third.takes_up_the_stream()
    assert holder(redis) == third.pid
    third.signal(signal.SIGSTOP)  # from here on, only the first could take entries
    entries_before = redis.xrange(key_names.STREAM)
    append(redis, "after")
    first.signal(signal.SIGCONT)
    assert first.ends() == 1
    assert first.said.splitlines()[-1] == LOST
    assert "Traceback" not in first.said
    assert pending(redis) == 1
    left: Any = redis.xrange(key_names.STREAM)
    assert left[:-1] == entries_before
    assert not redis.exists(key_names.VERDICTS)
    assert not (first.checkpoints / "CURRENT").exists()
    third.signal(signal.SIGCONT)
    wait_until(lambda: pending(redis) == 2)


def test_a_trainer_process_loads_its_model_only_once_it_has_the_memory(
    start: Start, redis: Redis, tmp_path: Path
) -> None:
    """It is told to stop while it waits for a second server. The first one has its memory back at once."""
    with server_thread(tmp_path, memory_sharing(tmp_path)) as server:
        wait_until(server.is_ready)
        away = f"http://127.0.0.1:{free_port()}"
        shared = {"WEIR_TRAINER__MEMORY": "shared", "WEIR_TRAINER__SHARED_WITH": f"{server.url},{away}"}
        trainer = start("trainer", WEIR_ADMIN_KEYS=ADMIN_KEY, **shared)

        def waits_for() -> str:
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            try:
                reply = httpx.get(f"http://127.0.0.1:{trainer.port}/status", headers=headers, timeout=120)
            except httpx.TransportError:
                return ""
            return str(reply.json()["waiting_for"])

        wait_until(lambda: away in waits_for() and "Connect" in waits_for())
        assert server.status()["released"]
        wait_until(lambda: redis.hexists(key_names.TRAINER, "disk"))
        trainer.signal(signal.SIGTERM)
        assert trainer.ends() == 0, trainer.said
        assert "stopped before the model was loaded" in trainer.said
        wait_until(lambda: server.status()["state"] == "ready", 20.0)
