"""Routes of FastAPI that count the values of a JSON body before they decode it (`foreign_json`).

So no body keeps the process from its other requests, whatever is in it.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from rollout_queue.foreign_json import LARGE_BYTES, TooManyValues, check_values, read_json
from rollout_queue.http.bodies.large_bodies import worked
from rollout_queue.http.errors import ApiError
from rollout_queue.http.keys import presented_key

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route whose body has at most so many values; more is a 400."""

    most_values = 20_000
    """What fits into the longest metadata, and more: FastAPI takes microseconds for each wrong value."""

    def check(self, body: bytes) -> None:
        """Raises TooManyValues."""
        check_values(body, self.most_values)

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def bounded(request: Request) -> Response:
            body = await request.body()
            value = await worked(presented_key(request.headers), body, self._decoded, body)
            return await handler(_ReadRequest(request, body, value))

        return bounded

    def _decoded(self, body: bytes) -> Any:
        """The value of a body; None if it cannot be read. Raises ApiError 400 for too many values."""
        try:
            self.check(body)
            return read_json(body)
        except TooManyValues as error:
            raise ApiError(400, f"the body has {error}", code="too_many_values") from error
        except msgspec.DecodeError:
            return None


class _ReadRequest(Request):
    """A request whose body was read; `value` is None if it is not the JSON that `foreign_json` reads."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._bytes, self._value = body, value

    async def body(self) -> bytes:
        return self._bytes

    async def json(self) -> Any:
        if self._value is not None:
            return self._value
        if len(self._bytes) > LARGE_BYTES:
            raise json.JSONDecodeError("no JSON in UTF-8", "", 0)
        return json.loads(self._bytes)  # it reads NaN and the like, which the fields of bodies refuse by name
