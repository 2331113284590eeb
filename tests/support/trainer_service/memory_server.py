"""A rollout server that gives its engine's memory away, for the trainer's tests."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx


@dataclass
class MemoryServer:
    """Notes what it is asked, and what the trainer does meanwhile, in `events`."""

    events: list[str] = field(default_factory=list)
    released: bool = False
    away: int = 0
    """How many requests nobody answers before one is answered."""
    on_refusal: Callable[[], object] = lambda: None
    """Called before a request that nobody answers."""
    releases: int = 0
    starting: int = 0
    """How often it says that its engine starts: a release would kill the engine."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            self.away -= 1
            self.on_refusal()
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/status":
            if starting := self.starting > 0:
                self.starting -= 1
                self.events.append("starts")
            return httpx.Response(200, json={"state": "starting" if starting else "ready", "version": 0})
        body = json.loads(request.content)
        assert body["holder"]
        if request.url.path == "/memory/release":
            assert 0 < body["for_s"] <= 600
            self.releases += 1
            renewed, self.released = self.released, True
            if not renewed:
                self.events.append("release")
            return httpx.Response(200, json={"version": 0, "renewed": renewed})
        assert request.url.path == "/memory/resume"
        if self.released:
            self.events.append("resume")
        self.released = False
        return httpx.Response(200, json={"version": 0})

    def watch(self, owner: object, *names: str) -> None:
        """Note each call of these methods of `owner`, and whether the engine had the memory."""
        for name in names:
            setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def noting(*given: object, **more: object) -> object:
            self.events.append(name)
            return call(*given, **more)

        return noting
