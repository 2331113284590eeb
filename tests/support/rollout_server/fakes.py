"""A fake SGLang for the reload tests: it has weights, lists its calls, and fails where a test says so."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import httpx

from rollout_server.weights.policy import LocalPolicy


class FakeEngine:
    """An engine that can be restarted: `start` starts its process, `handle` answers its HTTP requests."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.boots: list[LocalPolicy] = []
        self.process: FakeProcess | None = None
        self.directory = Path()
        self.version = "0"
        self.paused = False
        self.running = 2
        self.boot_gate = asyncio.Event()
        """The engine finishes its start when this event is set."""
        self.boot_gate.set()
        self.load_gate = asyncio.Event()
        """A load of weights continues when this event is set."""
        self.load_gate.set()
        self.says_version: str | None = None
        self.on_load: Callable[[], httpx.Response | None] = lambda: None
        """Called before a load, and may answer in its place."""
        self.keeps_old_weights = False

    async def start(self, policy: LocalPolicy) -> "FakeProcess":
        self.boots.append(policy)
        self.directory, self.version, self.paused = policy.directory, str(policy.version), False
        self.process = FakeProcess()
        return self.process

    @property
    def checksum(self) -> str:
        files = sorted(self.directory.glob("*.safetensors"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if self.process is None or self.process.exited:
            raise httpx.ConnectError("nobody listens")
        if path == "/ready":
            return httpx.Response(200 if self.boot_gate.is_set() and not self.paused else 503)
        if path == "/ping":
            return httpx.Response(200)
        self.calls.append(path)
        if path == "/model_info":
            return httpx.Response(200, json={"weight_version": self.says_version or self.version})
        if path == "/weights_checker":
            return httpx.Response(200, json={"success": True, "per_engine_checksum": self.checksum})
        if path == "/v1/loads":
            return httpx.Response(
                200,
                json={"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": self.running // 2}]},
            )
        if path == "/update_weights_from_disk":
            await self.load_gate.wait()
            return self._load(json.loads(request.content))
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        return httpx.Response(200, json={"status": "ok"})

    def _load(self, body: dict[str, str]) -> httpx.Response:
        assert self.paused, "weights must not change under a running generation"
        if (answer := self.on_load()) is not None:
            return answer
        if not self.keeps_old_weights:
            self.directory = Path(body["model_path"])
        self.version = body["weight_version"]
        return httpx.Response(200, json={"success": True, "message": ""})


class FakeProcess:
    """A process that runs until it is stopped or killed."""

    def __init__(self) -> None:
        self._dead = asyncio.Event()

    @property
    def exited(self) -> bool:
        return self._dead.is_set()

    async def wait(self) -> int:
        await self._dead.wait()
        return -9

    async def kill(self) -> None:
        self._dead.set()

    async def stop(self) -> None:
        self._dead.set()

    def log_tail(self) -> str:
        return "the fake was killed"
