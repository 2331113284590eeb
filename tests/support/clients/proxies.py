"""Proxies before the gateway: one counts calls, one loses an answer, and one is like a bad network."""

import asyncio
import random
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
LOST, TWICE, DELAYED = 0.05, 0.05, 0.2
LONGEST_DELAY_S = 0.3
LONGEST_ANSWER_S = 300.0


@dataclass
class Proxy:
    """Forwards every request to `url`."""

    url: str

    def app(self) -> Starlette:
        methods = ["GET", "POST", "DELETE", "PUT"]
        routes = [Route("/{path:path}", self.forward, methods=methods)]
        return Starlette(routes=routes, lifespan=self._opened)

    @asynccontextmanager
    async def _opened(self, _: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=LONGEST_ANSWER_S, limits=limits) as client:
            self._client = client
            yield

    async def forward(self, request: Request) -> Response:
        reply = await self.send(request)
        kept = {name: value for name, value in reply.headers.items() if name not in HOP}
        return Response(reply.content, reply.status_code, kept)

    async def send(self, request: Request) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        path, query, body = request.url.path, request.url.query, await request.body()
        return await self._client.request(request.method, path, params=query, content=body, headers=headers)


@dataclass
class CountingProxy(Proxy):
    """Counts requests by the last part of their path that is not an id."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Those that were answered with a status of 400 or more, as "route status"."""

    async def forward(self, request: Request) -> Response:
        answer = await super().forward(request)
        path = request.url.path.removeprefix("/api/v1/")
        route = "/".join(part for part in path.split("/") if not re.search(r"[:\d]", part))
        self.counts[route] += 1
        if answer.status_code >= 400:
            self.refused[f"{route} {answer.status_code}"] += 1
        return answer


@dataclass
class LossyProxy(Proxy):
    """Replaces the first answer to a POST by a 502: the gateway has answered, but the client retries."""

    lost: int = 0
    retry_counts: list[str] = field(default_factory=list)
    """The header `x-stainless-retry-count` of each call."""

    async def forward(self, request: Request) -> Response:
        answer = await super().forward(request)
        self.retry_counts.append(request.headers.get("x-stainless-retry-count", ""))
        if request.method == "POST" and not self.lost:
            self.lost += 1
            return Response(status_code=502)
        return answer


@dataclass
class UnreliableProxy(Proxy):
    """Loses answers after their requests took effect, delays some requests, so that others overtake them, and
    sends some twice. `done` counts what it did to them."""

    seed: int
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    async def forward(self, request: Request) -> Response:
        delay, lost, twice = (self._draw.random() < share for share in (DELAYED, LOST, TWICE))
        if delay:
            self.done["delayed"] += 1
            await asyncio.sleep(self._draw.uniform(0, LONGEST_DELAY_S))  # others overtake it
        if twice:
            self.done["twice"] += 1
            await self.send(request)
        answer = await super().forward(request)
        if lost:
            self.done["lost"] += 1
            return Response(status_code=502)
        return answer
