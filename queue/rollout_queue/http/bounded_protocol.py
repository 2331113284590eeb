"""uvicorn's HTTP protocol with bounds on what a peer sends, and on how long it may stall.

A connection is closed when the peer sends no whole head in time, stops sending a body, or stops reading. It
stays open while a body or an answer makes progress, however slow that is.

A request that offers another protocol, such as HTTP/2 or a WebSocket, is served as if it did not. A client of
HTTP/1.0, which reads no chunks, gets none.

ConnectionBounds say how many connections there may be, and how long a peer may be silent.
"""

import json
import logging
import resource
import socket
import struct
from asyncio import BaseTransport, Transport
from collections import Counter
from http import HTTPStatus
from typing import Any, Literal, cast

import httptools
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rollout_queue import clock
from rollout_queue.http.errors import ApiError
from rollout_queue.settings import SettingsPart

logger = logging.getLogger(__name__)

OTHER_FILES = 256
"""Files that a service may open besides its clients' connections and as many connections to engines."""


class ConnectionBounds(SettingsPart):
    """Bounds on the connections to one service."""

    in_all: int = Field(8192, ge=1)
    """Connections that are open at once, idle ones included; a further one gets a 429."""
    per_address: int = Field(4096, ge=1)
    """The same for one address of a client. All clients behind one proxy have the proxy's address."""
    head_bytes: int = Field(64 * 2**10, ge=1024)
    """Largest request line and headers together; a larger head gets a 431."""
    head_timeout_s: float = Field(10.0, gt=0)
    """A request's head has to arrive within this time. If only a part arrives, the client gets a 408; if no
    byte arrives on a new connection, the connection is just closed."""
    body_timeout_s: float = Field(30.0, gt=0)
    """A body of which not even 1 KiB arrives within this time gets a 408."""
    write_timeout_s: float = Field(30.0, gt=0)
    """A client that does not read even 1 KiB of its waiting answer within this time is disconnected."""


class ConnectionCount:
    """The open connections to one service, by address."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self.refused = 0
        self._in_all = 0
        self._by_address: Counter[str] = Counter()

    def admit(self, address: str) -> ApiError | None:
        """Count a new connection, or return the error that refuses it."""
        if self._in_all >= self.bounds.in_all:
            return _too_many(f"this service has {self._in_all} connections, and takes no more")
        if self._by_address[address] >= self.bounds.per_address:
            return _too_many(f"your address has {self._by_address[address]} connections, and gets no more")
        self._in_all += 1
        self._by_address[address] += 1
        return None

    def leave(self, address: str) -> None:
        self._in_all -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def allow_files(bounds: ConnectionBounds) -> ConnectionBounds:
    """Raise this process's limit on open files as far as the bounds need it and the system permits.

    Returns the bounds, with fewer connections if the system permits fewer files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * bounds.in_all + OTHER_FILES
    permitted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < permitted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (permitted, hard))
    if permitted >= wanted:
        return bounds
    in_all = max(1, (permitted - OTHER_FILES) // 2)
    logger.warning("the system permits %d open files: at most %d connections are taken", permitted, in_all)
    return bounds.model_copy(update={"in_all": in_all})


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, code="connections_limit")


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for such a client: an answer without a length ends with the connection.

    uvicorn writes chunks if the answer has no length. So it is told, before each part, that the part is all
    that is left.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return served


FLOW = "weir.flow"
"""In the scope's state, the connection's FlowControl: `send` waits while its writing is paused."""
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
        cycle.scope["state"][FLOW] = cycle.flow
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
