"""`python -m gateway` as a process: it serves, exits with 0 on SIGTERM, and needs keys on open addresses."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.engines.cancellation import cancel_and_wait
from rollout_queue.http.server import KEEP_ALIVE_S
from tests.support.gateway.running import Backends
from tests.support.serving import free_port


def start(backends: Backends, tiny_model: Path, **variables: str) -> tuple[subprocess.Popen[str], str]:
    port = free_port()
    environment = os.environ | {
        "WEIR_REDIS_URL": backends.redis_url,
        "WEIR_MODEL_PATH": str(tiny_model),
        "WEIR_ENGINES": backends.engine_url,
        "WEIR_GATEWAY__PORT": str(port),
        **variables,
    }
    command = [sys.executable, "-m", "gateway"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    return process, f"http://127.0.0.1:{port}"


def test_sigterm_ends_it_with_0(backends: Backends, tiny_model: Path) -> None:
    process, url = start(backends, tiny_model)
    client = httpx.Client(transport=httpx.HTTPTransport(retries=10), base_url=url, timeout=120)
    assert client.get("/live", timeout=300).json() == {"live": True}
    client.close()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "no keys are set" in said


def test_without_keys_it_does_not_listen_to_the_network(backends: Backends, tiny_model: Path) -> None:
    process, _ = start(backends, tiny_model, WEIR_GATEWAY__HOST="0.0.0.0")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "refusing to listen on 0.0.0.0 without keys" in said


def test_clients_close_idle_connections_first() -> None:
    """Otherwise a client might send a request on a connection that the gateway is just closing."""
    expiry_s = httpx.Limits().keepalive_expiry
    assert expiry_s is not None
    assert expiry_s < KEEP_ALIVE_S


async def test_a_task_that_swallows_its_first_cancellation_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.engines.cancellation.CANCEL_AGAIN_S", 0.01)
    lost: list[BaseException] = []

    async def forgetful() -> None:
        while True:
            try:
                await asyncio.sleep(60)  # until the task is cancelled
            except asyncio.CancelledError as error:
                lost.append(error)
                if len(lost) == 2:
                    raise

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)  # the task begins
    await asyncio.wait_for(cancel_and_wait([task]), timeout=300)
    assert (task.cancelled(), len(lost)) == (True, 2)
