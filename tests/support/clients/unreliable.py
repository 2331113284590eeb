"""A proxy like a bad network: it loses answers after their requests took effect, delays some requests, so
that others overtake them, and sends some twice."""

import asyncio
import random
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
LOST, TWICE, DELAYED = 0.05, 0.05, 0.2
LONGEST_DELAY_S = 0.3
LONGEST_POLL_S = 120.0


@dataclass
class UnreliableProxy:
    """Forwards every request to `url`. `done` counts what it did to them."""

    url: str
    seed: int
    done: Counter[str] = field(default_factory=Counter)

    def app(self) -> Starlette:
        routes = [Route("/{path:path}", self.forward, methods=["GET", "POST"])]
        return Starlette(routes=routes, lifespan=self._opened)

    @asynccontextmanager
    async def _opened(self, _: Starlette) -> AsyncIterator[None]:
        self._draw = random.Random(self.seed)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=LONGEST_POLL_S, limits=limits) as client:
            self._client = client
            yield

    async def forward(self, request: Request) -> Response:
        body = await request.body()
        delay, lost, twice = (self._draw.random() < share for share in (DELAYED, LOST, TWICE))
        if delay:
            self.done["delayed"] += 1
            await asyncio.sleep(self._draw.uniform(0, LONGEST_DELAY_S))  # others overtake it
        if twice:
            self.done["twice"] += 1
            await self._send(request, body)
        reply = await self._send(request, body)
        if lost:
            self.done["lost"] += 1
            return Response(status_code=502)
        kept = {name: value for name, value in reply.headers.items() if name not in HOP}
        return Response(reply.content, reply.status_code, kept)

    async def _send(self, request: Request, body: bytes) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        return await self._client.request(
            request.method, request.url.path, params=request.url.query, content=body, headers=headers
        )
