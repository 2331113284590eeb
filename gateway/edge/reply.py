"""Writes the reply to one client: one whole body, or a stream of server-sent events.

A heartbeat here is an event that clients ignore: it keeps proxies from closing a silent stream.
"""

import asyncio
from collections.abc import Callable, Mapping

from starlette.types import Message, Send

from gateway.counters import CLIENT_LEFT, CallFigures
from gateway.edge.one_line import one_line
from rollout_queue import clock

Headers = Mapping[str, str]

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Reply:
    """The reply to one call."""

    def __init__(self, send: Send, request_id: str, figures: CallFigures, *, last: bool = False) -> None:
        """`last`: the connection closes after the reply."""
        self._send = send
        self.figures = figures
        self._own_headers = [
            (b"x-request-id", request_id.encode()),
            (b"request-id", request_id.encode()),  # read by Anthropic's clients
        ]
        if last:
            self._own_headers.append((b"connection", b"close"))
        self.more_headers: Callable[[], Headers] = dict
        """Headers of the caller's limits, as of the moment at which the reply begins."""
        self.status = CLIENT_LEFT
        """The status that was sent."""
        self.begun = False
        """Whether a status was sent. An error after that can only be an event of the stream."""
        self._heartbeats: tuple[bytes, float, Callable[[], Headers | None]] | None = None
        """The event, the seconds between two, and the headers of a stream that begins with one."""
        self._timer: clock.Timer | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._made_at = clock.monotonic()
        self._written_at = self._answered_at = 0.0
        """When the last bytes were written, and when the last event of the answer was; 0 for never."""

    async def send_json(self, status: int, body: bytes, headers: Headers) -> None:
        """Answer with one JSON body."""
        self.stop_heartbeat()
        self.begun = True
        fixed = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._start(status, [*fixed, *_encoded(headers), *self._own_headers])
        await self._send({"type": "http.response.body", "body": body})

    async def open_stream(self, headers: Headers) -> None:
        """Begin a stream of server-sent events, with 200."""
        self.begun = True
        await self._start(200, [*STREAM_HEADERS, *_encoded(headers), *self._own_headers])

    async def write(self, events: bytes) -> None:
        """Write whole events of the answer to an open stream."""
        now = clock.monotonic()
        if self._answered_at:
            self.figures.gaps.add(now - self._answered_at)
        else:
            self.figures.first_token.add(now - self._made_at)
        self._written_at = self._answered_at = now
        await self._send({"type": "http.response.body", "body": one_line(events), "more_body": True})

    async def close(self, events: bytes = b"") -> None:
        """Write the last events and the end of the body in one message, since clients wait for the end."""
        if self._timer is not None:
            self._timer.cancel()
        if self._heartbeat is not None:
            await self._heartbeat  # it may still be writing to a slow socket
        await self._send({"type": "http.response.body", "body": one_line(events)})

    def redirect(self, send: Send) -> Send:
        """Send all later messages through `send`. Returns the function that sent them before."""
        former, self._send = self._send, send
        return former

    async def repeat(self, message: Message) -> None:
        """Send a message that was recorded from another reply, with this reply's request id."""
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            self.figures.statuses[self.status] += 1
            own = {name for name, _ in self._own_headers}
            headers = [header for header in message["headers"] if header[0] not in own]
            message = {**message, "headers": [*headers, *self._own_headers]}
        await self._send(message)

    def keep_alive(self, heartbeat: bytes, every_s: float, headers: Callable[[], Headers | None]) -> None:
        """Write a heartbeat whenever nothing was written for `every_s` seconds, until `stop_heartbeat`.

        If a heartbeat is due and the stream has not begun, it is opened with the headers that `headers`
        returns. While `headers` returns None, nothing is written.
        """
        self._written_at, self._heartbeats = clock.monotonic(), (heartbeat, every_s, headers)
        self._timer = clock.call_later(every_s / 2, self._check_silence)

    def _check_silence(self) -> None:
        if (heartbeats := self._heartbeats) is None:
            return
        heartbeat, every_s, headers = heartbeats
        silent = clock.monotonic() - self._written_at >= every_s
        if silent and (self._heartbeat is None or self._heartbeat.done()):
            self._heartbeat = asyncio.create_task(self._write_heartbeat(heartbeat, headers))
        self._timer = clock.call_later(every_s / 2, self._check_silence)

    async def _write_heartbeat(self, heartbeat: bytes, headers: Callable[[], Headers | None]) -> None:
        if not self.begun:
            if (own := headers()) is None:
                return
            await self.open_stream(own)
        self._written_at = clock.monotonic()
        await self._send({"type": "http.response.body", "body": heartbeat, "more_body": True})

    def stop_heartbeat(self) -> None:
        """Write none any longer. After this, the reply refers to nothing that refers to it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._timer = self._heartbeat = self._heartbeats = None

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.figures.statuses[status] += 1
        headers += _encoded(self.more_headers())
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _encoded(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
