"""The connections to engines: the gateway's own HTTP/1.1 client, with POST, keep-alive and streamed bodies.

A general HTTP client takes more CPU time per call than all other work of the gateway for that call. The
parser is httptools, which the gateway's server uses as well.
"""

import asyncio
import socket
import ssl
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Final, cast
from urllib.parse import urlsplit

import aiohttp
import httptools

from rollout_queue import clock

CONNECT_TIMEOUT_S = 5.0
IDLE_LIMIT_S = 3.0
"""SGLang closes idle connections after 5 s. The gateway closes them earlier, so that no request meets a
connection that the engine is closing."""
LAST_BYTES_S = 2.0
"""How long the end of an answer may take after `leave`; then the connection is closed."""
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
KEEP_ALIVE: Final = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,  # in ms
}
"""Within 20 s, the kernel closes a connection whose other end is not there any more."""


class ConnectFailed(Exception):
    """No connection could be made."""


class ConnectionLost(Exception):
    """The connection ended before the answer did."""


class ReadTimedOut(Exception):
    """Nothing arrived for longer than the read timeout."""


HIGH_WATER_BYTES = 2**20
"""From this many unread bytes on, the connection stops reading from its socket, and the engine waits."""


class EngineConnections:
    """A pool of connections, by address. `read_timeout_s` is the longest wait for a next byte."""

    def __init__(
        self,
        read_timeout_s: float,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        idle_limit_s: float = IDLE_LIMIT_S,
        last_bytes_s: float = LAST_BYTES_S,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        self._read_timeout_s = read_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._idle_limit_s = idle_limit_s
        self._last_bytes_s = last_bytes_s
        self._idle: dict[str, deque[EngineConnection]] = defaultdict(deque)

    async def post(self, url: str, path: str, body: bytes, trace: str | None = None) -> "EngineConnection":
        """Send the body; returns when the answer's status has arrived. `trace` is the header `traceparent`.
        The caller calls `release` or `leave` of the answer exactly once.

        Raises ConnectFailed, ConnectionLost or ReadTimedOut.
        """
        connection = self._pooled(url) or await self._connect(url)
        try:
            await connection.send(_head(url, path, len(body), self._headers, trace), body)
        except BaseException:
            connection.drop()
            raise
        return connection

    async def close(self) -> None:
        """Close every connection."""
        for idle in self._idle.values():
            for connection in idle:
                connection.drop()
        self._idle.clear()

    def _pooled(self, url: str) -> "EngineConnection | None":
        idle = self._idle[url]
        oldest = clock.monotonic() - self._idle_limit_s
        while idle and idle[0].idle_since < oldest:
            idle.popleft().drop()
        while idle:
            if (connection := idle.pop()).usable:
                return connection
        return None

    async def _connect(self, url: str) -> "EngineConnection":
        address, loop = urlsplit(url), asyncio.get_running_loop()
        secure = address.scheme == "https"
        try:
            async with clock.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(
                        self._idle[url].append, self._read_timeout_s, self._last_bytes_s
                    ),
                    address.hostname or "",
                    address.port or (443 if secure else 80),
                    ssl=_tls() if secure else None,
                )
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(f"{type(error).__name__}: {error}") from error
        return connection


class EngineConnection(asyncio.Protocol):
    """One connection, and the response that arrives over it."""

    def __init__(
        self, keep: "Callable[[EngineConnection], None]", read_timeout_s: float, last_bytes_s: float
    ) -> None:
        self._keep = keep
        self._read_timeout_s = read_timeout_s
        self._last_bytes_s = last_bytes_s
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        # The parser takes its callbacks from `self` here. This one adds a body without running Python code.
        self.on_body = self._parts.append
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._use: Callable[[bytes], bool] | None = None
        """Takes bytes at their arrival, while `follow` waits."""
        self._context = copy_context()
        """In which it runs."""
        self._timer: clock.Timer | None = None
        self._transport: asyncio.Transport | None = None
        self._unread = 0
        self._paused = False
        self._lost = self._left = False
        self._failure: Exception | None = None
        self._received_at = self._stood_still_s = 0.0
        self._complete = self._reusable = True
        self.status = 0
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        return not self._lost and self._failure is None and self._complete

    async def send(self, head: bytes, body: bytes) -> None:
        """Send a request and wait for the answer's status. Raises ConnectionLost or ReadTimedOut."""
        if self._transport is None or self._lost:
            raise ConnectionLost("closed")
        self.status, self._complete, self._received_at = 0, False, clock.monotonic()
        if self._timer is None:
            self._time(min(self._read_timeout_s, self._last_bytes_s))
        self._transport.write(head + body)
        while not self.status:
            if self._failure is not None:
                raise self._failure
            await self._more()

    async def read(self) -> bytes:
        """All bytes that arrived since the last read; waits for at least one. Empty at the answer's end.

        Raises ConnectionLost or ReadTimedOut.
        """
        while not self._parts:
            if self._complete:
                return b""
            if self._failure is not None:
                raise self._failure
            await self._more()
        return self._taken()

    async def follow(self, use: Callable[[bytes], bool]) -> bool:
        """Call `use` with all bytes that have arrived, and then at each arrival, until it returns False.

        Returns False at the answer's end. `use` runs in the caller's context, but outside of its task.

        Raises what `use` raises, ConnectionLost or ReadTimedOut.
        """
        while not self._parts or use(self._taken()):
            if self._complete:
                return False
            if self._failure is not None:
                raise self._failure
            self._use, self._context = use, copy_context()
            try:
                await self._more()
                if self._use is None:
                    return True
            finally:
                self._use = None
        return True

    def _taken(self) -> bytes:
        data = b"".join(self._parts) if len(self._parts) > 1 else self._parts[0]
        self._parts.clear()
        self._unread = 0
        if self._paused and not self._lost and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        """Give the connection back to the pool if the answer was read to its end; otherwise close it."""
        if not (self.usable and self._reusable) or self._parts:
            self.drop()
            return
        self.idle_since = clock.monotonic()
        self._keep(self)

    def leave(self) -> None:
        """Discard the rest of the answer. Give the connection back once the rest has arrived."""
        self._left = True
        self._discard()

    def drop(self) -> None:
        """Close the connection at once."""
        self._stop_timer()
        self._lost = True
        if self._transport is not None:
            self._transport.abort()

    def _discard(self) -> None:
        self._parts.clear()
        self._unread = 0
        if self._complete:
            self._left = False
            self.release()

    def _use_arrived(self, use: Callable[[bytes], bool]) -> None:
        """Let `use` take the bytes that arrived. Wake its task if that takes no more, or fails."""
        try:
            if self._context.run(use, self._taken()):
                return
        except Exception as error:  # `follow` raises it
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
        self._use = None
        self._wake()

    def _more(self) -> asyncio.Future[None]:
        """Is done at the next event of the connection."""
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None

    def _check_timeout(self) -> None:
        """Check when bytes arrived last, and start the timer again. One timer serves many answers."""
        if self._complete:
            self._timer = None
            return
        timeout_s = self._last_bytes_s if self._left else self._read_timeout_s
        self._received_at += clock.standstill_s() - self._stood_still_s
        left_s = self._received_at + timeout_s - clock.monotonic()
        # If bytes are unread, the reader is slow, not the engine.
        if left_s > 0 or self._parts:
            next_s = min(max(left_s, timeout_s / 10), self._last_bytes_s)
            self._time(next_s)
            return
        if self._left:
            self.drop()
            return
        self._failure = ReadTimedOut(f"nothing arrived for {self._read_timeout_s:g} s")
        self._wake()

    def _time(self, seconds: float) -> None:
        self._stood_still_s = clock.standstill_s()
        self._timer = clock.deadline(seconds, self._check_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._complete:  # bytes that no request asked for
            self.drop()
            return
        self._received_at = clock.monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._failure = ConnectionLost(f"not HTTP: {error}")
            self.drop()
        if self._left:
            self._discard()
            return
        if self._use is not None and self._parts:
            self._use_arrived(self._use)
            if not self._complete and self._failure is None:
                return
        self._unread += len(data)
        if (
            self._unread > HIGH_WATER_BYTES
            and not (self._paused or self._lost)
            and self._transport is not None
        ):
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        if self._complete:
            self._stop_timer()
        elif self._failure is None:
            reason = f"{type(error).__name__}" if error else "closed"
            self._failure = ConnectionLost(reason)
        self._wake()

    # What the parser calls

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0  # the final status follows a 1xx

    def on_message_complete(self) -> None:
        if self.status:
            self._complete = True
            self._reusable = self._parser.should_keep_alive()


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@lru_cache(maxsize=1024)
def _request_line(url: str, path: str) -> bytes:
    address = urlsplit(url)
    return (
        f"POST {address.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {address.netloc.rpartition('@')[2]}\r\n"
        "content-type: application/json\r\naccept: text/event-stream\r\ncontent-length: "
    ).encode()


def _head(url: str, path: str, length: int, more: bytes, trace: str | None) -> bytes:
    more += b"" if trace is None else b"traceparent: %b\r\n" % trace.encode()
    return b"%b%d\r\n%b\r\n" % (_request_line(url, path), length, more)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel check the other end of a connection while no bytes flow."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def engine_connector(idle_limit_s: float) -> aiohttp.TCPConnector:
    """Connections of aiohttp to engines and rollout servers: as many as calls need, with TCP keep-alive."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_limit_s, socket_factory=_open_socket)


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    keep_alive(opened)
    return opened
