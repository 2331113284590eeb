"""Reads a request: its headers, and its whole body, which must be of one media type and within limits.

DisconnectWatch ends the work for a client that has left. The images of a call are read before its session is
found, since they tell conversations apart, too; its limits and a session that it names are checked before.
"""

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

import msgspec
from starlette.types import Receive, Scope

from gateway.callers.identity import Caller
from gateway.errors import LimitReached
from gateway.generations.generation import Call
from gateway.language.image_pads import image_parts
from gateway.language.image_reading import ImageReader
from gateway.prometheus import Metrics
from rollout_queue import clock
from rollout_queue.http.body_limit import HEADER, codings_of, content_encoding, decoded
from rollout_queue.http.errors import ApiError

WATCH_AFTER_S = 0.5
"""Most calls end sooner. Only longer calls start the task that watches the connection."""


class DisconnectWatch:
    """`with DisconnectWatch(receive) as client:` cancels the block when the client disconnects.

    The `with` statement swallows this cancellation.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[object] | None = None
        """Runs the block; None outside of it."""
        self.watched = False
        """Whether the task that watches the connection has started."""
        self._watching: asyncio.Task[None] | None = None
        self._stopped = False

    def __enter__(self) -> "DisconnectWatch":
        self._task = asyncio.current_task()
        self._timer = clock.call_later(WATCH_AFTER_S, self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        # Without this, nothing of a call refers to itself: its memory need not wait for the collector.
        task, self._task = self._task, None
        if not self._stopped or task is None or task.uncancel():
            return False
        return kind is asyncio.CancelledError

    def _watch(self) -> None:
        self.watched = True
        self._watching = asyncio.get_running_loop().create_task(self._until_disconnect())

    async def _until_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._task is not None:
            self._stopped = True
            self._task.cancel()


JSON = "application/json"
HEAVY_BYTES = 32 * 2**10
"""A body up to this size is tokenized on the event loop, since a thread would cost more time."""
KEPT_FREE = 8
"""One part in so many of the memory for bodies is free for keys that hold little."""


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete, so it gets no answer."""


@dataclass
class BodyBudget:
    """Bounds the bytes of all bodies that the gateway holds at once, in all and per key.

    The bodies of a key's sessions count for the key. An eighth of all bytes is free for keys that hold
    little, so no key can keep another one's calls out.
    """

    max_bytes: int
    in_all: int
    per_key: int
    metrics: Metrics
    _held: int = 0
    _held_by: dict[Hashable, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kept_free = self.in_all // KEPT_FREE
        self.most_of_one = min(self.in_all - self._kept_free, self.per_key)
        """How many bytes one call may have, if no other call has any."""

    def add(self, held: "HeldBody", size: int) -> None:
        """Raises LimitReached if the bytes do not fit, and ApiError 413 if the call alone has more bytes than
        the gateway may hold."""
        payer, whole = held.payer, held.size + held.kept + size
        if whole > self.most_of_one:  # it would not fit when all other calls are done, either
            message = f"the body and its images have {whole} bytes or more, of {self.most_of_one} allowed"
            raise ApiError(413, message)
        own = self._held_by.get(payer, 0)
        holds_little = own + size <= self._kept_free // 2
        in_all = self.in_all if holds_little else self.in_all - self._kept_free
        for before, limit in ((self._held, in_all), (own, self.per_key)):
            if before + size > limit:
                message = f"the bodies of calls that wait have {before} bytes, of {limit} allowed; try again"
                raise self.metrics.refused(LimitReached(message, code="bodies_limit", retry_s=1))
        self._held += size
        self._held_by[payer] = own + size

    def remove(self, payer: Hashable, size: int) -> None:
        self._held -= size
        self._held_by[payer] -= size
        if not self._held_by[payer]:
            del self._held_by[payer]


@dataclass
class HeldBody:
    """One body that is being read or turned into tokens. Its bytes count until the end of a `with` block, or
    until `release`."""

    budget: BodyBudget
    payer: Hashable
    """For whom the bytes count (`Caller.payer`)."""
    size: int = 0
    kept: int = 0
    """Bytes of images, which are needed until the answer is recorded."""

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Count no byte any longer."""
        if size := self.size + self.kept:
            self.size = self.kept = 0
            self.budget.remove(self.payer, size)

    def count(self, size: int) -> None:
        """Count more bytes of the body, or that it becomes beside itself. Raises as `BodyBudget.add`."""
        self.budget.add(self, size)
        self.size += size

    def become(self, size: int) -> None:
        """Count so many bytes, which the body has become, in place of those that were counted for it."""
        if self.size != size:
            self.budget.remove(self.payer, self.size - size)
        self.size = size

    def keep(self, size: int) -> None:
        """Count bytes that outlast `release`. Raises as `count`."""
        self.budget.add(self, size)
        self.kept += size

    def release(self) -> None:
        """Count the bytes no longer, except those that are kept."""
        if self.size:
            self.budget.remove(self.payer, self.size)
            self.size = 0

    def moved(self) -> "HeldBody":
        """The bytes, for work that goes on when the `with` block has ended."""
        moved, self.size, self.kept = HeldBody(self.budget, self.payer, self.size, self.kept), 0, 0
        return moved


class AgentRequest(msgspec.Struct):
    """One request on an agent's path."""

    caller: Caller
    headers: Mapping[str, str]
    """By lower-case name. Of a repeated header, the last value counts."""
    body: bytes
    client: DisconnectWatch
    held: HeldBody
    """Counts the body's bytes; released once the body was turned into tokens. Ends with the call."""
    session_id: str | None = None
    """The session id in the path."""

    def release(self) -> None:
        """Forget the body, which was turned into tokens."""
        self.body = b""
        self.held.release()

    @property
    def heavy(self) -> bool:
        """Whether the body is tokenized in a thread."""
        return len(self.body) > HEAVY_BYTES


def headers_of(scope: Scope) -> dict[str, str]:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if HEADER in headers:  # a list, whose items may be on several lines
        headers[HEADER] = content_encoding(scope)
    return headers


async def read_body(
    headers: Mapping[str, str], receive: Receive, held: HeldBody, media_type: str = JSON
) -> bytes:
    """The whole body, decoded.

    Raises ApiError 413 for one over the limit, 415 for one that is not of this media type or that has another
    encoding than those served, 400 for one that cannot be decoded; also LimitReached and ClientDisconnected.
    """
    announced, most = headers.get("content-length", ""), held.budget.max_bytes
    if announced.isdecimal() and int(announced) > most:
        raise ApiError(413, f"the body is larger than {most} bytes")
    has_body = announced not in ("", "0") or "transfer-encoding" in headers
    if has_body and (given := headers.get("content-type", media_type)) != media_type:
        _check_media_type(given, media_type)
    codings = codings_of(headers[HEADER]) if has_body and HEADER in headers else ()
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        if held.size + len(parts[-1]) > most:
            raise ApiError(413, f"the body is larger than {most} bytes")
        held.count(len(parts[-1]))
        more = message.get("more_body", False)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if codings:
        parts.clear()
        body = await decoded(body, codings, most, held.count)
        held.become(len(body))
    return body


def _check_media_type(given: str, wanted: str) -> None:
    media_type = given.partition(";")[0].strip().lower()
    if media_type != wanted:
        raise ApiError(415, f"content type {media_type!r}: send {wanted}")


def has_images(call: Call) -> bool:
    return next(image_parts(call.messages), None) is not None


async def with_images(reader: ImageReader, call: Call, held: HeldBody) -> Call:
    """The call with its images decoded. Their bytes count beside the body's, and longer than those.

    Raises InvalidRequest, LimitReached, StorageUnavailable, and ApiError 413 for images that never fit.
    """
    messages, pngs = await reader.read(call.messages, held.keep)
    if not pngs:
        return call
    return msgspec.structs.replace(call, messages=messages, images=pngs)
