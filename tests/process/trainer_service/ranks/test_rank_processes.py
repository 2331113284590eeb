"""The trainer's own processes: two ranks publish in shares, and one waits for the memory of its device."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from rollout_queue.contract.policies.policy import STABLE
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


def test_a_trainer_process_loads_its_model_only_once_it_has_the_memory(
    pair: RankPair, model_path: Path, redis_url: str, tmp_path: Path
) -> None:
    """It is told to stop while it waits for a second server. The first one has its memory back at once."""
    with redis_at(redis_url) as redis:
        redis.flushdb()
    with server_thread(tmp_path, memory_sharing(tmp_path)) as server:
        wait_until(server.is_ready)
        port, away, log = free_port(), free_port(), tmp_path / "trainer.log"
        settings = {
            "WEIR_REDIS_URL": redis_url,
            "WEIR_MODEL_PATH": str(model_path),
            "WEIR_ADMIN_KEYS": ADMIN_KEY,
            "WEIR_TRAINER__CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
            "WEIR_TRAINER__POLICIES_DIR": str(tmp_path / "policies"),
            "WEIR_TRAINER__PORT": str(port),
            "WEIR_TRAINER__DEVICE": "cpu",
            "WEIR_TRAINER__LEASE_S": "1",
            "WEIR_TRAINER__MEMORY": "shared",
            "WEIR_TRAINER__SHARED_WITH": f"{server.url},http://127.0.0.1:{away}",
        }

        def waits_for() -> str:
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            try:
                status = httpx.get(f"http://127.0.0.1:{port}/status", headers=headers, timeout=120).json()
            except httpx.TransportError:
                return ""
            return str(status["waiting_for"])

        place = pair.run([Program(settings, log)])
        (trainer,) = pair.ranks(place)
        try:
            wait_until(lambda: f"http://127.0.0.1:{away}" in waits_for() and "Connect" in waits_for())
            assert server.status()["released"]
            trainer.terminate()
            assert pair.ended(place) == [0], log.read_text()
            assert "stopped before the model was loaded" in log.read_text()
        finally:
            if not pair.has_ended(place):
                trainer.kill()
        wait_until(lambda: server.status()["state"] == "ready", 20.0)
