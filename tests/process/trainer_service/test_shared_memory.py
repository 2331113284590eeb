"""A trainer's process and an engine on one device."""

import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.gateway.running import ADMIN_KEY
from tests.support.redis_clients import redis_at
from tests.support.rollout_server.in_process import memory_sharing, server_thread
from tests.support.serving import free_port
from tests.support.waiting import wait_until


def test_a_trainer_process_loads_its_model_only_once_it_has_the_memory(
    model_path: Path, redis_url: str, tmp_path: Path
) -> None:
    """It is told to stop while it waits for a second server. The first one has its memory back at once."""
    with redis_at(redis_url) as redis:
        redis.flushdb()
    with server_thread(tmp_path, memory_sharing(tmp_path)) as server:
        wait_until(server.is_ready)
        port, away = free_port(), free_port()
        settings = {
            "WEIR_REDIS_URL": redis_url,
            "WEIR_MODEL_PATH": str(model_path),
            "WEIR_ADMIN_KEYS": ADMIN_KEY,
            "WEIR_TRAINER__CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
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

        log = tmp_path / "trainer.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "trainer_service"]
            trainer = subprocess.Popen(command, cwd=tmp_path, env=os.environ | settings, stderr=output)
        try:
            wait_until(lambda: f"http://127.0.0.1:{away}" in waits_for() and "Connect" in waits_for())
            assert server.status()["released"]
            trainer.terminate()
            assert trainer.wait(300) == 0, log.read_text()
            assert "stopped before the model was loaded" in log.read_text()
        finally:
            trainer.kill()
        wait_until(lambda: server.status()["state"] == "ready", 20.0)
