"""Bodies of the REST routes: JSON and nothing else, and none over the limit."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.edge.request import Hangup, headers_of, take_in
from rollout_queue.http.errors import ApiError


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
            body = await take_in(headers_of(scope), receive, self._limit_bytes)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except Hangup:
            return
        await self._app(scope, _replayed(body, receive), send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What the route receives: the body in one message, then what the client does after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
