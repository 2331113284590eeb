"""A proxy that counts what a client asks for, by route."""

import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
"""httpx sets these anew; it also decompresses answers."""
LONGEST_POLL_S = 120.0


@dataclass
class CountingProxy:
    """Forwards every request to `url`."""

    url: str
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by the last part of their path that is not an id."""
    refused: Counter[str] = field(default_factory=Counter)
    """Those that were answered with a status of 400 or more, as "route status"."""

    def app(self) -> Starlette:
        methods = ["GET", "POST", "DELETE", "PUT"]
        routes = [Route("/{path:path}", self.forward, methods=methods)]
        return Starlette(routes=routes, lifespan=self._opened)

    @asynccontextmanager
    async def _opened(self, _: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=LONGEST_POLL_S, limits=limits) as client:
            self._client = client
            yield

    async def forward(self, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        body = await request.body()
        reply = await self._client.request(
            request.method, request.url.path, params=request.url.query, content=body, headers=headers
        )
        route = _route(request.url.path)
        self.counts[route] += 1
        if reply.status_code >= 400:
            self.refused[f"{route} {reply.status_code}"] += 1
        kept = {name: value for name, value in reply.headers.items() if name not in HOP}
        return Response(reply.content, reply.status_code, kept)


def _route(path: str) -> str:
    parts = [part for part in path.removeprefix("/api/v1/").split("/") if not re.search(r"[:\d]", part)]
    return "/".join(parts)
