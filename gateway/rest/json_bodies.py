"""Checks a request's body before its REST route receives it: JSON only, and within the limit."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.edge.request import ClientDisconnected, headers_of, read_body
from rollout_queue.http.errors import ApiError


class JsonBodies:
    """ASGI middleware that reads the whole body: 413 if it is over the limit, 415 if it is not JSON."""

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
    """The route's `receive`: the body as one message, then the client's further messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
