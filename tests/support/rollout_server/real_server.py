"""A rollout server in a process of its own, with the real SGLang behind it.

Needs a Python that has SGLang: `.venv-engine`, or WEIR_ROLLOUT_SERVER__ENGINE_PYTHON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_queue.http.callers import bearer
from tests.support.rollout_server.weights import publish
from tests.support.serving import free_port
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]
ENGINE_PYTHON = Path(
    os.environ.get("WEIR_ROLLOUT_SERVER__ENGINE_PYTHON", ROOT / ".venv-engine" / "bin" / "python")
)
PATIENCE_S = 600.0
REAL_ENGINE = [
    pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="no Python with SGLang"),
]


@dataclass
class Running:
    """One rollout server in its own process, with its engine."""

    process: subprocess.Popen[bytes]
    directory: Path
    url: str
    engine_url: str
    engine: httpx.Client
    """Calls the engine, with its key."""
    collective: bool = False
    """Whether manifests say that the trainer sends the tensors."""

    @property
    def engine_log(self) -> Path:
        return next((self.directory / "run" / "logs").glob("*-engine.log"))

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=PATIENCE_S).json()
        return answer

    def reload(self, version: int, directory: Path, **more: Any) -> httpx.Response:
        body = {"version": version, "location": directory.as_uri(), **more}
        return httpx.post(f"{self.url}/reload", json=body, timeout=PATIENCE_S)

    def served(self) -> str:
        return str(self.engine.get("/model_info").json()["weight_version"])

    def checksum(self) -> str:
        answer = self.engine.post("/weights_checker", json={"action": "checksum"})
        return str(answer.json()["per_engine_checksum"])

    def flushes(self) -> bool:
        return self.engine.post("/flush_cache").status_code == 200

    def memory(self, action: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/memory/{action}", json=body, timeout=PATIENCE_S)

    def generates(self, tokens: int = 4) -> list[int]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [1, 2, 3], "sampling_params": sampling}
        answer = self.engine.post("/generate", json=body).json()
        ids: list[int] = answer["output_ids"]
        return ids

    def engine_pid(self) -> int:
        """The engine is the one child of its server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def until_ready(self, restarts: int = 0) -> None:
        until_s = time.monotonic() + 900
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
            publish(directory, number, collective=self.collective)
        return directory


@contextmanager
def real_server(
    directory: Path, model: Path, *, collective: bool = False, **settings: Any
) -> Iterator[Running]:
    """A rollout server for the model, ready. `settings` are its own, beside the model's and the ports'."""
    port, engine_port = free_port(), free_port()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "queue")]),
        "WEIR_MODEL_PATH": str(model),
        "WEIR_ROLLOUT_SERVER__PORT": str(port),
        "WEIR_ROLLOUT_SERVER__ENGINE_PORT": str(engine_port),
        "WEIR_ROLLOUT_SERVER__ENGINE_PYTHON": str(ENGINE_PYTHON),
        "WEIR_ROLLOUT_SERVER__ENGINE_DEVICE": "cpu",
    }
    environment |= {
        f"WEIR_ROLLOUT_SERVER__{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in settings.items()
    }
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout_server"], cwd=directory, env=environment, stdout=log, stderr=log
        )
    url, engine_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{engine_port}"
    headers = bearer(settings.get("engine_key"))
    try:
        with httpx.Client(base_url=engine_url, headers=headers, timeout=PATIENCE_S) as engine:
            running = Running(process, directory, url, engine_url, engine, collective)
            running.until_ready()
            yield running
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=PATIENCE_S)
