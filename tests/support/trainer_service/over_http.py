"""Serves the fake gateway to processes."""

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.trainer_service.harness import FakeGateway


def over_http(gateway: FakeGateway) -> Starlette:
    async def answer(request: Request) -> Response:
        told = gateway(httpx.Request(request.method, str(request.url), content=await request.body()))
        return Response(told.content, told.status_code, media_type="application/json")

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST", "DELETE"])])
