"""The trainer's own processes, with two ranks: a step on episodes from Redis is published in shares."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

from rollout_queue.contract.policies.policy import STABLE
from tests.support.redis_clients import redis_at
from tests.support.serving import free_port, serving
from tests.support.trainer_service.harness import FakeGateway
from tests.support.trainer_service.over_http import over_http
from tests.support.trainer_service.redis_agents import RedisAgents
from tests.support.waiting import wait_until
from weir.stack.services import launcher

STARTS_WITHIN_S = 400.0


def test_two_rank_processes_publish_in_shares_and_end_when_told(
    tmp_path: Path, model_path: Path, redis_url: str
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
        command = [sys.executable, *launcher(2), "-m", "trainer_service", "--config", str(config)]
        path = os.pathsep.join(path for path in sys.path if path)
        with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}) as process:
            try:
                wait_until(lambda: gateway.announced or process.poll() is not None, STARTS_WITHIN_S)
                assert [body["version"] for body in gateway.announced] == [1]
                process.send_signal(signal.SIGTERM)
                process.wait(300)
            finally:
                if process.poll() is None:
                    for worker in psutil.Process(process.pid).children(recursive=True):
                        worker.kill()
                process.kill()
    version = policies / "v00000001"
    assert (version / STABLE).exists()
    assert sorted(path.name for path in version.glob("*.safetensors")) == [
        f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)
    ]
    assert [path.name for path in policies.iterdir()] == [version.name]
