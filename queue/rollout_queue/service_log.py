"""Lines of a service's log: text or one JSON object, bounded, without control characters and secrets.

Each line of a request or a step carries its ids:

request ──▶ LogIds in a context variable ──▶ every log line of its task, and of the tasks that it starts

The access log: one line for each request of a service. It holds no query, no key and no body.
"""

import json
import logging
import re
from collections.abc import Iterable
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_queue import clock

logger = logging.getLogger("weir.access")


MOST_CHARACTERS = 256
"""Of one id in a log line: a session id may come from a client."""


class LogIds(msgspec.Struct):
    """What is known so far of the present work. The parts that find out more write it here."""

    request_id: str | None = None
    session_id: str | None = None
    turn_id: str | None = None
    step: int | None = None
    key: str | None = None
    """The name of the caller's key; for the access log alone."""

    def fields(self) -> dict[str, str | int]:
        """The ids that are known, by the names that they have in a log line."""
        found = {
            "request_id": self.request_id,
            "session_id": self.session_id,
            "turn_id": self.turn_id,
            "step": self.step,
        }
        return {
            name: value if isinstance(value, int) else value[:MOST_CHARACTERS]
            for name, value in found.items()
            if value is not None
        }


_ids: ContextVar[LogIds | None] = ContextVar("log_ids", default=None)


def begin_log_ids(request_id: str | None = None, session_id: str | None = None) -> LogIds:
    """The ids of a request that begins, or of a thread's work."""
    ids = LogIds(request_id, session_id)
    _ids.set(ids)
    return ids


def log_ids() -> LogIds:
    """The ids of the present work. Without any, new ones that no other line has."""
    return _ids.get() or LogIds()


class of_turn:  # noqa: N801 - it is used as a function; a generator would take three times as long
    """Log lines in the block carry this turn's id. The ids of a call keep that of its first turn; further
    turns, which may be made concurrently, have ids of their own."""

    __slots__ = ("_token", "_turn_id")

    def __init__(self, turn_id: str) -> None:
        self._turn_id = turn_id

    def __enter__(self) -> None:
        self._token: Token[LogIds | None] | None = None
        former = _ids.get() or LogIds()
        if former.turn_id in (None, self._turn_id):
            former.turn_id = self._turn_id
        else:
            self._token = _ids.set(msgspec.structs.replace(former, turn_id=self._turn_id))

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _ids.reset(self._token)


MOST_BYTES = 64 * 2**10
"""Of one line in JSON, or one line of text. Longer texts lose their middle."""
SHORTEST_SECRET = 8
"""A shorter secret is not searched for: its letters would be found in harmless words."""
HARMFUL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that end a line, command a terminal, turn the direction of text, or have no UTF-8."""
BEARER = re.compile(r"(?i)\b(bearer\s+|x-api-key\W{1,4})[^\s'\",;]+")
CREDENTIALS = re.compile(r"://[^/@\s]*@")


class SecretFilter:
    """Replaces secrets in texts: those that it knows, and what looks like a request's key or password."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted({each for each in secrets if len(each) >= SHORTEST_SECRET}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def clean(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub("***", text)
        return CREDENTIALS.sub("://***@", BEARER.sub(r"\1***", text))


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER: MESSAGE` in one line. The lines of a traceback follow, each indented."""

    def __init__(self, secrets: SecretFilter, process: str = "") -> None:
        """`process`: what distinguishes processes of one service that share a log."""
        super().__init__()
        self._secrets = secrets
        self._process = f" {process}" if process else ""

    def format(self, record: logging.LogRecord) -> str:
        at = self.formatTime(record)
        head = f"{at}{self._process} {record.levelname} {record.name}: "
        line = head + escaped(self._secrets.clean(record.getMessage()))
        if trace := _traceback(self, record):
            return "\n".join([shortened(line), *_indented(self._secrets.clean(trace))])
        return shortened(line)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII: time, level, logger, message, ids, and the exception as text."""

    def __init__(self, secrets: SecretFilter, process: str = "") -> None:
        super().__init__()
        self._secrets = secrets
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
            **log_ids().fields(),
            **getattr(record, "fields", {}),
        }
        if trace := _traceback(self, record):
            fields["exception"] = trace
        fields = {
            name: self._secrets.clean(value) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        return _bounded(fields)


def escaped(text: str) -> str:
    r"""The text without harmful characters, which are written as \n, \x1b and the like."""
    return HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int = MOST_BYTES) -> str:
    """The text with its middle left out if it has more than `most` bytes in UTF-8."""
    size = len(text.encode(errors="replace"))
    if size <= most:
        return text
    kept = max(0, most * len(text) // size - 64) // 2  # a text of one kind has about even characters
    while kept and len((text[:kept] + text[-kept:]).encode(errors="replace")) > most - 64:
        kept = kept * 3 // 4
    left_out = len(text) - 2 * kept
    return f"{text[:kept]} … {left_out} characters … {text[len(text) - kept :]}"


def _bounded(fields: dict[str, Any]) -> str:
    """The fields as JSON. If that is too long, texts are shortened until it is not."""
    most = MOST_BYTES
    while len(line := json.dumps(fields, default=str)) > MOST_BYTES:
        most //= 2
        fields = {
            name: shortened(value, most) if isinstance(value, str) else value
            for name, value in fields.items()
        }
    return line


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    return "\n".join([*parts, formatter.formatStack(record.stack_info)] if record.stack_info else parts)


def _indented(trace: str) -> list[str]:
    """The lines of a traceback. Its message may hold line ends, and no line may look like a new entry."""
    return [f"    {shortened(escaped(line))}" for line in shortened(trace).split("\n")]


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
