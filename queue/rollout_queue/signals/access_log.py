"""The access log: one line for each request of a service. It holds no query, no key and no body."""

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_queue import clock
from rollout_queue.signals.log_format import escaped
from rollout_queue.signals.log_ids import begin_log_ids, log_ids

logger = logging.getLogger("weir.access")

NO_ROUTE = "-"
"""The path of a request that no route serves: the path that it asked for could be anything."""
LEFT = 499
"""The status of a request whose client left before the response began."""


class AccessLog:
    """Outermost ASGI application: logs each request of `app` when its response has ended.

    The path is the route's, with the names of its parameters: `/sessions/{session_id}`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, size = clock.monotonic(), LEFT, 0

        async def counted(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                size += len(message.get("body", b""))
            await send(message)

        begin_log_ids()
        try:
            await self._app(scope, receive, counted)
        finally:
            _write(scope, status, size, clock.monotonic() - began)


def _write(scope: Scope, status: int, size: int, seconds: float) -> None:
    ids, path = log_ids(), path_template(scope)
    method = escaped(scope["method"][:16])
    fields = {
        "method": method,
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "bytes": size,
        "key": ids.key,
    }
    named = "".join(f" {name}={escaped(str(value))}" for name, value in ids.fields().items())
    logger.info(
        "%s %s %d %.3f s %d bytes key=%s%s",
        method,
        path,
        status,
        seconds,
        size,
        ids.key or "-",
        named,
        extra={"fields": fields},
    )


def path_template(scope: Scope) -> str:
    """The path of the route that served a request."""
    own = scope.get("state", {}).get("path_template")  # of an application that has routes of its own
    # FastAPI notes a route of an included router with the whole path here; the route itself has a part of it.
    included = scope.get("fastapi", {}).get("effective_route_context")
    found = own or getattr(included or scope.get("route"), "path_format", None)
    return str(found) if found else NO_ROUTE
