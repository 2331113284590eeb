"""Rollout servers in this process: each has a thread, and its engine double has another one.

test ── ServerThread ─▶ thread: create_app(RolloutServer) ── starts, kills ─▶ thread: StubEngine
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

import httpx

from rollout_queue.http.callers import Keyring, bearer
from rollout_server.app import create_app
from rollout_server.server import RolloutServer
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.locations import LocalPolicy
from rollout_server.weights.weights_store import claim_weights
from tests.support.gateway.running import ADMIN_KEY
from tests.support.rollout_server.processes import ServerClient
from tests.support.rollout_server.stub_engine import Faults, StubEngine
from tests.support.rollout_server.weights import write_model
from tests.support.serving import Served, free_port

_running: ContextVar["ServerThread | None"] = ContextVar("_running", default=None)
"""The rollout server whose code runs."""


class EngineThread:
    """One run of an engine double. For `Engine` it is a process."""

    def __init__(self, policy: LocalPolicy, port: int, tokenizer: Path, faults: Callable[[], Faults]) -> None:
        self._over, self._code = asyncio.Event(), 0
        loop = asyncio.get_running_loop()

        def ended() -> None:
            with suppress(RuntimeError):  # the rollout server was killed before
                loop.call_soon_threadsafe(self._over.set)

        self.app = StubEngine(policy, tokenizer, faults, self._die)
        self._start = lambda: Served(self.app, port, ended=ended)
        self.served: Served

    async def start(self) -> "EngineThread":
        self.served = await asyncio.to_thread(self._start)
        return self

    @property
    def exited(self) -> bool:
        return self._over.is_set()

    async def wait(self) -> int:
        await self._over.wait()
        return self._code

    def kill_at_once(self) -> None:
        self._code = -signal.SIGKILL
        self.served.kill()

    async def kill(self) -> None:
        self.kill_at_once()
        await self._over.wait()

    async def stop(self) -> None:
        self.served.end()
        await self._over.wait()

    def log_tail(self) -> str:
        return ""

    def note_memory(self) -> None:
        """It has no shared memory."""

    async def _die(self) -> None:
        self.kill_at_once()
        await asyncio.Event().wait()  # until the task is cancelled


class ServerThread(ServerClient):
    """A rollout server, which a test may treat as a process."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        log = directory / f"engine-{settings['port']}.log"
        given: dict[str, Any] = {"admin_keys": [ADMIN_KEY], "engine_log": log} | settings
        self.settings = RolloutServerSettings(**given)
        super().__init__(
            f"http://127.0.0.1:{self.settings.port}",
            self.settings.engine_port,
            directory / f"server-{self.settings.port}.log",
        )
        self.faults: Faults = {}
        self.engine: EngineThread | None = None
        self._tokenizer = directory / "tokenizer.json"
        self._held = ExitStack()
        claim = claim_weights(self.settings)
        self._held.callback(claim.release)
        self._control = httpx.AsyncClient(
            base_url=self.settings.engine_control_url,
            headers=bearer(self.settings.engine_key),
            trust_env=False,
        )
        self._http = httpx.AsyncClient(timeout=self.settings.fetch_timeout_s)
        self.server = RolloutServer(
            self.settings,
            self._control,
            self._http,
            self._start_engine,
            claim.directory,
            float32_engine=True,
        )
        keyring = Keyring(
            admin_keys=self.settings.admin_keys, rollout_server_key=self.settings.rollout_server_key
        )
        self._log = logging.FileHandler(self.log)
        self._log.addFilter(lambda _: _running.get() is self)
        logging.getLogger("rollout_server").addHandler(self._log)
        self.served: Served = copy_context().run(self._serve, create_app(self.server, keyring))

    def control(self, **faults: Any) -> None:
        """Set how the server's engine behaves from now on (`Faults`)."""
        self.faults = faults

    @property
    def answers(self) -> int:
        """How many calls its present engine has sampled for."""
        return self.engine.app.answers if self.engine else 0

    def kill_engine(self) -> None:
        """End the engine as SIGKILL does."""
        assert self.engine is not None
        self.engine.kill_at_once()

    def suspend(self) -> None:
        """Let the server stand still, as SIGSTOP does. Its engine goes on."""
        self.served.suspend()

    def resume(self) -> None:
        self.served.resume()

    def kill(self) -> None:
        """End the server and its engine as SIGKILL does."""
        self.served.kill(self._control, self._http)
        if self.engine is not None:
            self.engine.kill_at_once()
        self._join()

    def leave(self) -> None:
        """End the server as SIGTERM does."""
        if not self.served.ended:
            self.served.resume()
            self.served.run(self.server.leave())
            self.end()

    def end(self) -> None:
        """End the server, and do not wait for calls."""
        self.served.resume()
        self.served.end()
        self._join()

    def _join(self) -> None:
        self.served.join()
        if self.engine is not None:
            self.engine.served.join()
        self._held.close()
        logging.getLogger("rollout_server").removeHandler(self._log)
        self._log.close()

    def _serve(self, app: Any) -> Served:
        _running.set(self)
        return Served(app, self.settings.port)

    async def _start_engine(self, policy: LocalPolicy) -> EngineThread:
        self.engine = EngineThread(policy, self.settings.engine_port, self._tokenizer, lambda: self.faults)
        return await self.engine.start()


def memory_sharing(directory: Path) -> dict[str, Any]:
    """Settings of a server without a gateway that shares its engine's memory."""
    return {
        "port": free_port(),
        "engine_port": free_port(),
        "model_path": write_model(directory / "model"),
        "weights_dir": directory / "weights",
        "policies_dir": directory / "policies",
        "memory": "shared",
    }


@contextmanager
def server_thread(directory: Path, settings: dict[str, Any]) -> Iterator[ServerThread]:
    server = ServerThread(directory, settings)
    try:
        yield server
    finally:
        server.end()
