"""The agents' door: bare ASGI in front of everything else, because it is what every token passes.

POST [/sessions/{id}]/v1/{chat/completions | completions | responses | messages | …} ──▶ a dialect
anything else ──▶ the REST application behind it
"""

import logging
from collections.abc import Mapping
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.collaborators import Collaborators
from gateway.edge.disconnect import Attention
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.reply import Reply
from gateway.edge.request import Arrival, Hangup, headers_of, take_in
from rollout_queue.http.errors import ApiError, request_id_of

logger = logging.getLogger(__name__)


class Desk(Protocol):
    """Serves one path: answers, or raises; says how its clients read an error."""

    async def serve(self, gateway: Collaborators, arrival: Arrival, reply: Reply) -> None: ...

    def error(self, error: ApiError) -> bytes: ...


class Door:
    """ASGI middleware, outermost: agents' calls go to the desk of their path."""

    gateway: Collaborators
    """The open parts; whoever opens them, sets them."""

    def __init__(self, app: ASGIApp, desks: Mapping[str, Desk]) -> None:
        self._app = app
        self._desks = desks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            session_id, path = _split(scope["path"])
            if (desk := self._desks.get(path)) is not None:
                await self._serve(desk, session_id, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _serve(
        self, desk: Desk, session_id: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = headers_of(scope)
        request_id = request_id_of(headers.get("x-request-id", ""))
        reply = Reply(send, request_id)
        try:
            gateway = self.gateway
            if scope["method"] != "POST":
                raise ApiError(405, f"{scope['method']}: this path takes POST", headers={"allow": "POST"})
            body = await take_in(headers, receive, gateway.settings.max_body_bytes)
            with Attention(receive) as client:
                await desk.serve(gateway, Arrival(headers, body, client, session_id), reply)
        except Hangup:
            pass
        except ANSWERABLE as error:
            await _refuse(desk, reply, api_error(error))
        except Exception:  # outermost frame: what escapes is a bug, and the caller still gets an answer
            logger.exception("request %s failed", request_id)
            await _refuse(desk, reply, ApiError(500, "internal error; the log names it by the request id"))
        finally:
            reply.rest()


async def _refuse(desk: Desk, reply: Reply, error: ApiError) -> None:
    if not reply.begun:
        await reply.whole(error.status, desk.error(error), error.headers)


def _split(path: str) -> tuple[str | None, str]:
    """The session that a path names, and the path without it."""
    if path.startswith("/sessions/"):
        session_id, slash, rest = path[10:].partition("/")
        return (session_id, slash + rest) if session_id else (None, path)
    return None, path
