"""The real SGLang behind a real rollout server: a push, broken pushes, deaths, and a clean end.

Needs a Python that has SGLang: `.venv-engine`, or WEIR_ROLLOUT_SERVER__ENGINE_PYTHON.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.rollout_server.weights import WEIGHTS, publish
from tests.support.serving import free_port
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
ENGINE_PYTHON = Path(
    os.environ.get("WEIR_ROLLOUT_SERVER__ENGINE_PYTHON", ROOT / ".venv-engine" / "bin" / "python")
)
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="no Python with SGLang"),
]


@dataclass
class Running:
    """One rollout server in its own process, with its engine."""

    process: subprocess.Popen[bytes]
    directory: Path
    url: str
    engine_url: str

    @property
    def engine_log(self) -> Path:
        return next((self.directory / "run" / "logs").glob("*-engine.log"))

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=10).json()
        return answer

    def reload(self, version: int, directory: Path, **more: Any) -> httpx.Response:
        body = {"version": version, "location": directory.as_uri(), **more}
        return httpx.post(f"{self.url}/reload", json=body, timeout=120)

    def served(self) -> str:
        return str(httpx.get(f"{self.engine_url}/model_info", timeout=10).json()["weight_version"])

    def checksum(self) -> str:
        answer = httpx.post(f"{self.engine_url}/weights_checker", json={"action": "checksum"}, timeout=10)
        return str(answer.json()["per_engine_checksum"])

    def generates(self) -> list[int]:
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [1, 2, 3], "sampling_params": sampling}
        answer = httpx.post(f"{self.engine_url}/generate", json=body, timeout=60).json()
        ids: list[int] = answer["output_ids"]
        return ids

    def engine_pid(self) -> int:
        """The engine is the one child of its server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def until_ready(self, restarts: int = 0) -> None:
        until_s = time.monotonic() + 240
        while time.monotonic() < until_s:
            assert self.process.poll() is None, (self.directory / "server.log").read_text()
            try:
                status = self.status()
                if status["state"] == "ready" and status["restarts"] >= restarts:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)  # another process starts an engine
        pytest.fail(self.engine_log.read_text()[-3000:])

    def version(self, number: int) -> Path:
        """Publish the model with other random weights."""
        directory = self.directory / "run" / "policies" / f"v{number:08d}"
        if not directory.exists():
            make_tiny_model(directory, seed=number)
            publish(directory, number)
        return directory


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("rollout")
    port, engine_port = free_port(), free_port()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "queue")]),
        "WEIR_MODEL_PATH": str(tiny_model),
        "WEIR_ROLLOUT_SERVER__PORT": str(port),
        "WEIR_ROLLOUT_SERVER__ENGINE_PORT": str(engine_port),
        "WEIR_ROLLOUT_SERVER__ENGINE_PYTHON": str(ENGINE_PYTHON),
        "WEIR_ROLLOUT_SERVER__ENGINE_DEVICE": "cpu",
    }
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout_server"], cwd=directory, env=environment, stdout=log, stderr=log
        )
    running = Running(process, directory, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{engine_port}")
    try:
        running.until_ready()
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)


def test_a_push_is_served_and_a_rollback_brings_the_same_weights_back(running: Running) -> None:
    before = running.checksum()
    answer = running.reload(1, running.version(1))
    assert answer.status_code == 200, answer.text
    assert running.served() == "1"
    first = running.checksum()
    assert first != before
    assert running.reload(2, running.version(2)).status_code == 200
    assert running.checksum() not in (before, first)
    assert running.reload(1, running.version(1), force=True).status_code == 200
    assert running.checksum() == first
    assert len(running.generates()) == 4


def _truncate(directory: Path) -> None:
    raw = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def _other_shapes(directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / WEIGHTS)
    tensors["model.norm.weight"] = torch.ones(32)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    publish(directory, 50)


@pytest.mark.parametrize("breaks", [_truncate, _other_shapes])
def test_a_broken_push_leaves_the_old_version_serving(running: Running, breaks: Any) -> None:
    served, checksum, pid = running.served(), running.checksum(), running.engine_pid()
    broken = running.directory / "run" / "policies" / breaks.__name__
    shutil.copytree(running.version(1), broken)
    publish(broken, 50)
    breaks(broken)
    answer = running.reload(50, broken)
    assert answer.status_code == 422, answer.text
    assert WEIGHTS in answer.json()["error"]["message"]
    assert (running.served(), running.checksum(), running.engine_pid()) == (served, checksum, pid)
    assert len(running.generates()) == 4


def test_an_engine_killed_while_idle_comes_back_with_the_current_policy(running: Running) -> None:
    assert running.reload(3, running.version(3)).status_code == 200
    checksum, ids, pid = running.checksum(), running.generates(), running.engine_pid()
    restarts = running.status()["restarts"]
    os.kill(pid, signal.SIGKILL)
    running.until_ready(restarts + 1)
    assert running.engine_pid() != pid
    assert running.status()["version"] == 3
    assert running.served() == "3"
    assert running.checksum() == checksum
    assert running.generates() == ids


def test_sigterm_ends_server_and_engine_with_exit_code_0(running: Running) -> None:
    pid = running.engine_pid()
    running.process.terminate()
    assert running.process.wait(timeout=60) == 0
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(running.engine_url, timeout=5)
