"""The error body and the request id of every answer of every service."""

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_queue.contract.errors import Deleted, StorageUnavailable
from rollout_queue.contract.ids import new_id
from rollout_queue.protocol.message import ErrorDetail, ErrorReply
from rollout_queue.service_log import begin_log_ids

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "gone_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "internal_error",
    503: "engine_unavailable",
    504: "timeout_error",
}
RETRY_AFTER_S = 1
MOST_SHOWN = 200
"""The most characters of a path in a sentence."""
PHRASES = ("Not Found", "Method Not Allowed")
FINAL = (409, 410)
"""Statuses after which a retry cannot succeed; OpenAI's and Anthropic's SDKs would retry a 409."""


class ApiError(Exception):
    """Makes an ErrorReply the answer. `type` follows from the status unless it is given."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,  # noqa: A002 - the contract's name
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or TYPES.get(status, "internal_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status in (429, 503) and "x-should-retry" not in self.headers:
            self.headers.setdefault("retry-after", str(RETRY_AFTER_S))
        if status in FINAL:
            self.headers.setdefault("x-should-retry", "false")

    @property
    def body(self) -> dict[str, Any]:
        detail = ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code)
        return ErrorReply(error=detail).model_dump()

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


def storage_unavailable(error: StorageUnavailable) -> ApiError:
    return ApiError(503, str(error), type="storage_unavailable")


def gone(error: Deleted) -> ApiError:
    return ApiError(410, str(error))


def install_error_handlers(app: FastAPI, served_elsewhere: Iterable[str] = ()) -> None:
    """Make every failure of `app` an answer with an ErrorReply as its body. `served_elsewhere` are paths that
    another application in front of it serves."""
    routes = Routes(app, served_elsewhere)

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)  # noqa: S101 - registered for this class alone
        return error.response()

    async def on_storage_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, StorageUnavailable)  # noqa: S101
        return storage_unavailable(error).response()

    async def on_deleted(_: Request, error: Exception) -> Response:
        assert isinstance(error, Deleted)  # noqa: S101
        return gone(error).response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        told = str(error.detail)
        if told in PHRASES:
            told = routes.refusal(request, error.status_code)
        if isinstance(why := error.__cause__, UnicodeDecodeError | RecursionError):  # FastAPI says nothing
            told = f"the body is no JSON: {why}"
        return ApiError(error.status_code, told, headers=error.headers).response()

    async def on_bad_body(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return ApiError(400, f"{where or 'body'}: {first['msg']}", param=where or None).response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(StorageUnavailable, on_storage_error)
    app.add_exception_handler(Deleted, on_deleted)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_bad_body)


def request_id_of(given: str) -> str:
    """The caller's request id where it is valid, else a new one."""
    return given if REQUEST_ID.fullmatch(given) else new_id()


class RequestIds:
    """Outermost ASGI middleware: gives each request an id, returns it, and answers unexpected errors with
    500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1"))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        begin_log_ids(request_id, state.get("session_id"))
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:  # outermost frame: an exception here is a bug, and the caller still gets an answer
            logger.exception("request %s failed", request_id)
            if started:
                raise
            error = ApiError(500, "internal error; the log has it under the request id")
            await error.response()(scope, receive, send_named)


class Routes:
    """The paths of an application, to say which one was meant."""

    def __init__(self, app: FastAPI, served_elsewhere: Iterable[str]) -> None:
        self._app, self._elsewhere = app, tuple(served_elsewhere)

    @cached_property
    def _by_core(self) -> Mapping[str, str]:
        """Each path by what is left of it if users write it otherwise."""
        paths = [path for route in self._app.routes if (path := getattr(route, "path", None))]
        of_sessions = [path.removeprefix("/sessions/{session_id}") for path in paths]
        return {_core(path): path for path in [*of_sessions, *paths, *self._elsewhere]}

    def refusal(self, request: Request, status: int) -> str:
        """The sentence for a path that does not exist (404), or not for this method (405)."""
        path = str(request.scope["path"])
        shown = f"{request.method} {path[:MOST_SHOWN]}"
        if status != 404:
            return f"{shown}: this path has other methods, which /openapi.json lists"
        whose, _, rest = path.removeprefix("/sessions/").partition("/")
        before = f"/sessions/{whose}" if path.startswith("/sessions/") and rest else ""
        known = self._by_core.get(_core(f"/{rest}" if before else path))
        meant = f"did you mean {before}{known}?" if known else "/openapi.json lists all paths"
        return f"{shown}: there is no such path; {meant}"


def _core(path: str) -> str:
    """The path without `/v1`, `s` at its end and slashes: what is often added or left out."""
    parts = [part for part in path[:MOST_SHOWN].lower().split("/") if part not in ("", "v1")]
    return "/".join(parts).rstrip("s")
