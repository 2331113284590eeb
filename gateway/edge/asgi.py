"""The outermost ASGI application: agents' calls go to the endpoint of their path, all else to FastAPI.

POST [/sessions/{id}]/v1/{chat/completions | completions | responses | messages | …} ──▶ an endpoint
anything else ──▶ the REST application behind it

It is bare ASGI, because every streamed token passes through it.
"""

import logging
from collections.abc import Mapping
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.edge.disconnect import DisconnectWatch
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.reply import Reply
from gateway.edge.request import AgentRequest, ClientDisconnected, headers_of, read_body
from rollout_queue.http.errors import ApiError, request_id_of

logger = logging.getLogger(__name__)


class Endpoint(Protocol):
    """Serves one path, and knows the wire shape of its errors."""

    async def serve(self, request: AgentRequest, reply: Reply) -> None:
        """Answer the request, or raise."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The body of an error."""
        ...


class EdgeApp:
    """The ASGI application that a server runs."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self.endpoints: Mapping[str, Endpoint] = {}
        """By path, without a session before it; set once the application has started."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            session_id, path = _split(scope["path"])
            if (endpoint := self.endpoints.get(path)) is not None:
                await self._serve(endpoint, session_id, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _serve(
        self, endpoint: Endpoint, session_id: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = headers_of(scope)
        request_id = request_id_of(headers.get("x-request-id", ""))
        reply = Reply(send, request_id)
        try:
            if scope["method"] != "POST":
                raise ApiError(405, f"{scope['method']}: this path takes POST", headers={"allow": "POST"})
            body = await read_body(headers, receive, self._max_body_bytes)
            with DisconnectWatch(receive) as client:
                await endpoint.serve(AgentRequest(headers, body, client, session_id), reply)
        except ClientDisconnected:
            pass
        except ANSWERABLE as error:
            await _refuse(endpoint, reply, api_error(error))
        except Exception:  # outermost frame: what escapes is a bug, and the caller still gets an answer
            logger.exception("request %s failed", request_id)
            bug = ApiError(500, "internal error; the log has it under the request id")
            await _refuse(endpoint, reply, bug)
        finally:
            reply.stop_heartbeat()


async def _refuse(endpoint: Endpoint, reply: Reply, error: ApiError) -> None:
    if not reply.begun:
        await reply.send_json(error.status, endpoint.error(error), error.headers)


def _split(path: str) -> tuple[str | None, str]:
    """The session that a path names, and the path without it."""
    if path.startswith("/sessions/"):
        session_id, slash, rest = path[10:].partition("/")
        return (session_id, slash + rest) if session_id else (None, path)
    return None, path
