"""Rollout servers as real processes, each with an engine double as its child."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.gateway.running import ADMIN_KEY


@dataclass
class ServerClient:
    """What a rollout server tells over HTTP."""

    url: str
    engine_port: int
    log: Path

    def status(self) -> dict[str, Any]:
        """What the server says of itself. Raises httpx.HTTPError."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        reply = httpx.get(f"{self.url}/status", headers=headers, timeout=120).raise_for_status()
        return dict(reply.json())

    def why_unready(self) -> str:
        """The sentence of `/ready`; empty while the server is ready or does not answer."""
        try:
            reply = httpx.get(f"{self.url}/ready", timeout=120)
        except httpx.TransportError:
            return ""
        return "" if reply.status_code == 200 else str(reply.json()["error"]["message"])

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=120).status_code == 200
        except httpx.TransportError:
            return False


@dataclass
class ServerProcess(ServerClient):
    """One `python -m rollout_server`."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def control(self, **faults: Any) -> None:
        """Set how the server's engine behaves from now on (`Faults`)."""
        path = self.log.parent / f"engine-{self.engine_port}.json"
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(faults))
        aside.rename(path)


@contextmanager
def running(directory: Path, settings: dict[str, Any], admin_key: str = ADMIN_KEY) -> Iterator[ServerProcess]:
    environment = os.environ | {
        f"WEIR_ROLLOUT_SERVER__{name}".upper(): str(value) for name, value in settings.items()
    }
    environment["WEIR_ADMIN_KEYS"] = admin_key
    environment["ENGINE_DOUBLE_DIR"] = str(directory)
    log = directory / f"server-{settings['port']}.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "rollout_server"]
        process = subprocess.Popen(command, cwd=directory, env=environment, stderr=output)
    try:
        yield ServerProcess(f"http://127.0.0.1:{settings['port']}", settings["engine_port"], log, process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(timeout=120)
