"""Reads a request: its headers, and its whole body, which must be JSON and within a limit."""

from collections.abc import Mapping

import msgspec
from starlette.types import Receive, Scope

from gateway.edge.disconnect import DisconnectWatch
from rollout_queue.http.errors import ApiError

JSON = "application/json"
HEAVY_BYTES = 32 * 2**10
"""A body up to this size is tokenized on the event loop, since a thread would cost more time."""


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete, so it gets no answer."""


class AgentRequest(msgspec.Struct):
    """One request on an agent's path."""

    headers: Mapping[str, str]
    """By lower-case name. Of a repeated header, the last value counts."""
    body: bytes
    client: DisconnectWatch
    session_id: str | None = None
    """The session id in the path."""

    @property
    def heavy(self) -> bool:
        """Whether the body is tokenized in a thread."""
        return len(self.body) > HEAVY_BYTES


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(headers: Mapping[str, str], receive: Receive, limit_bytes: int) -> bytes:
    """The whole body.

    Raises ApiError 413 for one over the limit, 415 for one that is not JSON; ClientDisconnected.
    """
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        more = message.get("more_body", False)
    if size and (given := headers.get("content-type", JSON)) != JSON:
        _check_media_type(given)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit_bytes} bytes")


def _check_media_type(given: str) -> None:
    media_type = given.partition(";")[0].strip().lower()
    if media_type != JSON:
        raise ApiError(415, f"content type {media_type!r}: send application/json")
