"""A rollout server with a fake engine behind it, and its HTTP interface in front."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

from rollout_queue.http.callers import Keyring
from rollout_server.app import create_app
from rollout_server.server import RolloutServer
from rollout_server.settings import RolloutServerSettings
from tests.support.rollout_server.fakes import FakeEngine
from tests.support.rollout_server.weights import (
    WEIGHTS,
    float32_tensors,
    publish,
    published_copy,
    write_model,
    write_safetensors,
)
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until_async

T = TypeVar("T")


class FakeNetwork:
    """The servers that a rollout server calls besides its engine: a gateway, and the trainer's files."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.answers: dict[str, httpx.Response] = {}
        self.source: Callable[[httpx.Request], Awaitable[httpx.Response]] | None = None
        """Answers every request, if it is set."""

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.source is not None:
            return await self.source(request)
        answer = self.answers.get(str(request.url))
        if answer is None:
            raise httpx.ConnectError("nobody listens")
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


@dataclass
class Harness:
    """The rollout server under test, its fake engine and its fake network."""

    server: RolloutServer
    engine: FakeEngine
    network: FakeNetwork
    http: httpx.AsyncClient
    directory: Path
    app: FastAPI

    def policy(self, version: int, fill: float | None = None) -> Path:
        """A valid published version with every weight equal to `fill`."""
        directory = self.directory / "policies" / f"v{version}"
        published_copy(self.directory / "model", directory, version)
        write_safetensors(directory / WEIGHTS, float32_tensors(fill or 1.0 + version))
        publish(directory, version)
        return directory

    async def reload(self, version: int, directory: Path | str | None = None, **more: Any) -> httpx.Response:
        location = directory.as_uri() if isinstance(directory, Path) else directory
        return await self.http.post("/reload", json={"version": version, "location": location, **more})

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.get("/status")).json()
        return answer

    async def kill_engine(self) -> None:
        """Kill the engine, as `kill -9` does; return once the server has noticed."""
        engine, before = self.server.engine, self.server.engine.restarts
        assert self.engine.process is not None
        await self.engine.process.kill()
        await wait_until_async(lambda: engine.restarts > before)

    async def until_ready(self) -> None:
        await self.server.engine.wait_until_serving(300.0)

    @asynccontextmanager
    async def started(self) -> AsyncIterator["Harness"]:
        """Start the server, and wait until its engine serves; close both in the end."""
        await self.server.open()
        try:
            await self.until_ready()
            yield self
        finally:
            await self.http.aclose()
            await self.server.close()

    @property
    def own(self) -> Path:
        """Where the server keeps its weights."""
        return self.directory / "weights" / "own"

    def kept(self) -> list[str]:
        """The versions on disk, such as `v00000001`."""
        return sorted(path.name[:9] for path in self.own.glob("v*"))

    def kept_weights(self, version: int) -> bytes:
        """The weights on disk of a version."""
        return next(self.own.glob(f"v{version:08d}-*/{WEIGHTS}")).read_bytes()


async def hastened(turned: TurnedClock, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Its pauses end at once."""
    task = asyncio.create_task(work)
    while not task.done():
        turned.turn(0.1)
        await asyncio.sleep(0.001)  # what has waited goes on
    return await task


def make_harness(directory: Path, **settings: Any) -> Harness:
    model = directory / "model"
    if not model.exists():
        write_model(model)
    configured = RolloutServerSettings(
        model_path=model,
        weights_dir=directory / "weights",
        policies_dir=directory / "policies",
        **{
            "drain_timeout_s": 0.02,
            "restart_backoff_s": 0.01,
            "engine_wait_s": 1.0,
            "register_every_s": 0.02,
            **settings,
        },
    )
    engine, network = FakeEngine(), FakeNetwork()
    server = RolloutServer(
        configured,
        httpx.AsyncClient(transport=httpx.MockTransport(engine.handle), base_url="http://engine"),
        httpx.AsyncClient(transport=httpx.MockTransport(network.handle)),
        engine.start,
        configured.weights_dir / "own",
        float32_engine=True,
    )
    own_key = configured.rollout_server_key
    app = create_app(server, Keyring(admin_keys=configured.admin_keys, rollout_server_key=own_key))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
    return Harness(server, engine, network, http, directory, app)
