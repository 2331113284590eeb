"""A proxy that loses one answer: the gateway has answered the call, but the client gets a 502 and retries."""

from dataclasses import dataclass, field

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HOP = {"host", "content-length", "transfer-encoding", "connection"}


@dataclass
class LossyProxy:
    """Forwards every request to `url`, and replaces the first answer to a POST by a 502."""

    url: str
    lost: int = 0
    retry_counts: list[str] = field(default_factory=list)
    """The header `x-stainless-retry-count` of each call."""

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self.forward, methods=["GET", "POST"])])

    async def forward(self, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        async with httpx.AsyncClient(timeout=300) as client:
            reply = await client.request(
                request.method, self.url + request.url.path, content=await request.body(), headers=headers
            )
        self.retry_counts.append(request.headers.get("x-stainless-retry-count", ""))
        if request.method == "POST" and not self.lost:
            self.lost += 1
            return Response(status_code=502)
        kept = {name: value for name, value in reply.headers.items() if name not in HOP}
        return Response(reply.content, reply.status_code, kept)
