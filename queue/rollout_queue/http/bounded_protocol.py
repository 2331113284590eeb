"""uvicorn's HTTP protocol with bounds on what a peer sends, and on how long it may stall.

A connection is closed when the peer sends no whole head in time, stops sending a body, or stops reading. It
stays open while a body or an answer makes progress, however slow that is.

A request that offers another protocol, such as HTTP/2 or a WebSocket, is served as if it did not. A client of
HTTP/1.0 gets no chunks.
"""

import json
import socket
import struct
from asyncio import BaseTransport, Transport
from http import HTTPStatus
from typing import Any, Literal, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rollout_queue import clock
from rollout_queue.http.connections import ConnectionCount
from rollout_queue.http.errors import ApiError
from rollout_queue.http.without_chunks import without_chunks

PROGRESS_BYTES = 1024
"""A peer makes progress if it sends or reads this many bytes within the timeout."""
MAX_PIPELINED = 16
"""Requests that a client may send on one connection before it has read the first one's answer."""
MAX_REFUSED = 256
"""Connections over the limit that get an error before they are closed. Further ones are just closed."""
REFUSED_S = 1.0
"""How long a refused connection stays open, so that the error reaches the client before the end does."""

LINGER_0 = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which a closed connection is reset."""

FRAMING = (b"content-length", b"transfer-encoding")
"""The headers that say where a body ends."""

Phase = Literal["between", "head", "body"]


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with `ConnectionBounds`."""

    def __init__(self, count: ConnectionCount, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._count, self._bounds = count, count.bounds
        self._address = ""
        self._refusal: ApiError | None = None
        """Why the connection is refused; None while it is not. Once this is set, nothing more is read."""
        self._phase: Phase = "between"
        self._repeats_head = False
        """Whether the parser is getting a head that was parsed before."""
        self._requests = 0
        self._head_bytes, self._most_head_bytes = 0, self._bounds.head_bytes
        self._received = 0
        self._unparsed = 0
        """Bytes that arrived since the parser last reported the end of a head, a part of a body, or the end
        of a message."""
        self._read_timer: clock.Timer | None = None
        self._timed: tuple[int, Phase] | None = None
        """What the read timer bounds: the number of a request, and its phase."""
        self._received_then = 0
        self._write_timer: clock.Timer | None = None
        self._unwritten_then = 0

    # Connections

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(cast(Transport, transport))
        self._address = self.client[0] if self.client else ""
        if (error := self._count.admit(self._address)) is not None:
            self._turn_away(error)
            return
        self._time_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._timed is not None:  # it was admitted
            self._count.leave(self._address)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait for a client that does not read
            self._reset()
        else:
            super().timeout_keep_alive_handler()

    def _turn_away(self, error: ApiError) -> None:
        self._refusal = error
        if self._count.refused >= MAX_REFUSED:
            self.transport.abort()
            return
        self._count.refused += 1
        self.transport.write(_response(error))
        self.transport.write_eof()
        self.transport.pause_reading()
        clock.call_later(REFUSED_S, self._leave_refused)

    def _leave_refused(self) -> None:
        self._count.refused -= 1
        self.transport.abort()

    # Reading

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._received += len(data)
        self._unparsed += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request"))
            return
        if self._unparsed > self._bounds.head_bytes:
            self._refuse(self._head_too_large())
        elif self._phase != "between" or self._idle:
            self._time_reading()
        elif self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _parse(self, data: bytes) -> None:
        """Parse the data. A parser stops behind a head with an offer; one that has not seen it goes on."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                data = data[stopped.args[0] :]
            framing = [b"%b: %b\r\n" % each for each in self.headers if each[0] in FRAMING]
            version = self.scope["http_version"].encode()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            known, self._head_bytes = len(self.headers), 0
            self._repeats_head = True
            self.parser.feed_data(b"POST / HTTP/%b\r\n%b\r\n" % (version, b"".join(framing)))
            self._repeats_head = False
            del self.headers[known:]

    def _should_upgrade(self) -> bool:
        return False

    def on_message_begin(self) -> None:
        if self._repeats_head:
            return
        super().on_message_begin()
        self._phase, self._head_bytes = "head", 0
        self._requests += 1

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        self._check_head()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._most_head_bytes:
            self._check_head()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._repeats_head:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = ApiError(400, f"more than {MAX_PIPELINED} requests wait for their answers")
            raise self._refusal
        if self.expect_100_continue and self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # its clients know no 100
        super().on_headers_complete()
        self._phase, self._unparsed = "body", 0

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the body follows, if there is one
        super().on_message_complete()
        self._phase, self._unparsed = "between", 0

    def _check_head(self) -> None:
        if self._head_bytes > self._most_head_bytes:
            self._refusal = self._head_too_large()
            raise self._refusal

    def _head_too_large(self) -> ApiError:
        return ApiError(431, f"the headers are larger than {self._bounds.head_bytes} bytes")

    @property
    def _idle(self) -> bool:
        """Whether no request is being served."""
        return self.cycle is None or self.cycle.response_complete

    def _time_reading(self) -> None:
        """Start the timer for the rest of the head, or for the next part of the body, unless it runs."""
        bounded = (self._requests, self._phase)
        if self._read_timer is not None:
            if bounded == self._timed:
                return
            self._read_timer.cancel()
        self._timed, self._received_then = bounded, self._received
        timeout_s = self._bounds.body_timeout_s if self._phase == "body" else self._bounds.head_timeout_s
        self._read_timer = clock.deadline(timeout_s, self._check_reading)

    def _check_reading(self) -> None:
        self._read_timer = None
        if self.transport.is_closing():
            return
        if self._phase == "body" and not self.cycle.response_complete:
            paused = self.flow.read_paused  # the service is not reading; the client need not send
            if paused or self._received - self._received_then >= PROGRESS_BYTES:
                self._time_reading()
                return
        if self._phase == "between" or (self._phase == "body" and self.cycle.response_complete):
            self.transport.close()  # nobody waits for an answer
        else:
            self._refuse(ApiError(408, f"the {self._phase} did not arrive in time"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with the error if no other answer has begun, and close the connection."""
        self._refusal = error
        serving = self.cycle is not None and not self.cycle.response_complete
        if not self.pipeline and not (serving and self.cycle.response_started):
            self.transport.write(_response(error))
        if serving:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    # Writing

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = cast(Any, without_chunks(app, cycle))
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._time_writing()

    def _time_writing(self) -> None:
        """Start the timer within which the client has to read a part of what waits for it, unless it runs."""
        if self._write_timer is None:
            self._unwritten_then = self.transport.get_write_buffer_size()
            self._write_timer = clock.deadline(self._bounds.write_timeout_s, self._check_writing)

    def _check_writing(self) -> None:
        self._write_timer = None
        unwritten = self.transport.get_write_buffer_size()
        if unwritten > self._unwritten_then - PROGRESS_BYTES:
            self._reset()
        else:
            self._time_writing()

    def _reset(self) -> None:
        """End the connection at once, with all that waits for the client.

        Without the option, the kernel would keep what it has taken already, up to megabytes, for minutes.
        """
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        self.transport.abort()


def _response(error: ApiError) -> bytes:
    body = json.dumps(error.body).encode()
    headers = {**error.headers, "content-type": "application/json", "content-length": str(len(body))}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
