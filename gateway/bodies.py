"""Bodies, on every path alike: JSON and nothing else, and none over the limit."""

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_queue.web.errors import ApiError


class Bodies:
    """ASGI middleware: takes in the whole body before a route does; 413 over the limit, 415 for no JSON."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._taken_in(Request(scope, receive))
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except ClientDisconnect:
            return
        await self._app(scope, _replayed(body, receive), send)

    async def _taken_in(self, request: Request) -> bytes:
        too_large = ApiError(413, f"the body is larger than {self._limit_bytes} bytes")
        if int(request.headers.get("content-length") or 0) > self._limit_bytes:
            raise too_large
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._limit_bytes:
                raise too_large
        if body and (kind := _media_type(request.headers)) != "application/json":
            raise ApiError(415, f"content type {kind!r}: send application/json")
        return bytes(body)


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "application/json").partition(";")[0].strip().lower()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What the route receives: the body in one message, then what the client does after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
