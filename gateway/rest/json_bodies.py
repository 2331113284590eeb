"""Reads the bodies of the REST routes before a route does: JSON only, and none over the limit."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.edge.request import ClientDisconnected, headers_of, read_body
from rollout_queue.http.errors import ApiError


class JsonBodies:
    """ASGI middleware that reads the whole body first; 413 for one over the limit, 415 for other types."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(headers_of(scope), receive, self._limit_bytes)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except ClientDisconnected:
            return
        await self._app(scope, _replayed(body, receive), send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What the route receives: the body in one message, then what the client sends after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
