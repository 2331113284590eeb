"""Checks a caller's key, and then the request's body, before a REST route receives them.

The body must be JSON, except on a few paths, and within the limits.
"""

import re
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.edge.errors import api_error
from gateway.edge.request import JSON, BodyBudget, ClientDisconnected, headers_of, read_body
from gateway.errors import GatewayError
from gateway.rest.access import admission_in, caller_in, operator_in
from rollout_queue.http.errors import ApiError

WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose bodies no route reads. Some of their routes need no key."""


PROTOBUF = "application/x-protobuf"
OWN_BODIES = frozenset({"/page/session"})
"""Paths whose routes read their bodies themselves: whoever signs in has no key in a header."""
UNCOUNTED = re.compile(
    r"/api/v1/(asample|retrieve_future|cancel_future|telemetry|session_heartbeat|client/\w+|weights_info|get_info"
    r"|sessions/search)|/sessions/[^/]+/heartbeat|(/sessions/[^/]+)?/v1/.*"
)
"""Requests with a body that store nothing, or that count as calls. All others of a client key are writes."""
MEDIA_TYPES = {"/api/v1/forward_backward": PROTOBUF}
"""The paths whose bodies are not JSON."""


class JsonBodies:
    """ASGI middleware that reads the whole body: 401 without a key, 429 for too many writes, 413 if it is too
    large, 415 if it is not JSON, or what the path takes instead."""

    def __init__(self, app: ASGIApp, bodies: BodyBudget) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        if scope["path"] in OWN_BODIES:
            with suppress(ClientDisconnected):
                await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        try:
            caller = operator_in(scope) if scope["path"].startswith("/admin/") else caller_in(scope)
            if caller.owner and not UNCOUNTED.fullmatch(scope["path"]):
                admission_in(scope).check_write(caller.owner)
        except GatewayError as error:
            await api_error(error).response()(scope, receive, send)
            return
        with self._bodies.hold(caller) as held:
            try:
                body = await read_body(headers, receive, held, MEDIA_TYPES.get(scope["path"], JSON))
            except (ApiError, GatewayError) as error:
                await api_error(error).response()(scope, receive, send)
            except ClientDisconnected:
                pass
            else:
                scope.setdefault("state", {}).update(caller=caller, held=held)
                await self._app(scope, _replayed(body, receive), send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The route's `receive`: the body as one message, then the client's further messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
