"""A small stand-in for a rollout server in the gateway's tests."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


@dataclass
class FakeRolloutServer:
    """The routes of a rollout server that the gateway calls: it accepts a policy or refuses it."""

    version: int = 0
    manifest: str | None = None
    refuse: bool = False
    refusal: int = 422
    """The status of an answer by which it refuses."""
    state: str = "ready"
    slow: bool = False
    """Whether it leaves a reload unanswered for now."""
    nonsense: Any = None
    """An answer to a reload that breaks the contract."""
    status_nonsense: Any = None
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of its status."""
    reloads: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/ready", self.ready),
                Route("/status", self.status),
                Route("/reload", self.reload, methods=["POST"]),
                Route("/reload/{version}", self.abort, methods=["DELETE"]),
            ]
        )

    def _state(self) -> dict[str, Any]:
        return {"state": self.state, "version": self.version, "manifest_sha256": self.manifest}

    async def status(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization", ""))
        return JSONResponse(self.status_nonsense or self._state() | self.more)

    async def ready(self, _: Request) -> Response:
        return JSONResponse({"ready": True})

    async def reload(self, request: Request) -> Response:
        self.reloads.append(await request.json())
        if self.refuse:
            return JSONResponse({"error": {"message": "a tensor is missing"}}, self.refusal)
        while self.slow:  # noqa: ASYNC110 - the test runs in another thread
            await asyncio.sleep(0.005)  # until the test clears `slow`
        if self.nonsense is not None:
            return JSONResponse(self.nonsense)
        if self.reloads[-1]["prepare"]:
            wanted = self.reloads[-1]["version"]
            return JSONResponse({"ok": True, "version": self.version, "prepared": wanted})
        self.version, self.manifest = self.reloads[-1]["version"], self.reloads[-1]["manifest_sha256"]
        return JSONResponse({"ok": True, "version": self.version, "paused_s": 0.01})

    async def abort(self, _: Request) -> Response:
        return JSONResponse({"version": self.version, "aborted": True})

    @property
    def loads(self) -> list[dict[str, Any]]:
        """The requests that were to load a version."""
        return [each for each in self.reloads if not each["prepare"]]


@dataclass
class Endpoint:
    """A server address behind which a test can exchange the fake server."""

    part: FakeRolloutServer = field(default_factory=FakeRolloutServer)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.part.app()(scope, receive, send)
