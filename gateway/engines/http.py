"""HTTP/1.1 to the engines, as thin as it gets: a POST whose answer is handed on as it arrives.

A general client costs more per call than all else that the gateway does for it. This one knows POST,
keep-alive and streamed bodies; parsing is httptools', as in the server.
"""

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, lru_cache
from typing import cast
from urllib.parse import urlsplit

import httptools

IDLE_LIMIT_S = 3.0
"""SGLang closes idle connections after 5 s; ours go first, so that no request meets a closed one."""
LAST_BYTES_S = 2.0
"""How long the end of an answer may take that nobody reads any more."""
HIGH_WATER_BYTES = 2**20
"""A reader that is behind by this much makes the engine's socket wait."""


class ConnectFailed(Exception):
    """Nobody listens there."""


class ConnectionLost(Exception):
    """The connection ended before the answer did."""


class Silence(Exception):
    """Nothing arrived for too long."""


class EngineHttp:
    """A pool of connections, by address. `silence_s`: the longest wait for a next byte."""

    def __init__(self, connect_s: float, silence_s: float) -> None:
        self._connect_s = connect_s
        self._silence_s = silence_s
        self._idle: dict[str, deque[Line]] = defaultdict(deque)

    async def post(self, url: str, path: str, body: bytes) -> "Line":
        """Send a JSON body; gives the line once the answer's status is there.

        Whoever called gives it back with `release`. Raises ConnectFailed, ConnectionLost or Silence.
        """
        line = self._pooled(url) or await self._connect(url)
        try:
            await line.send(_head(url, path, len(body)), body, self._silence_s)
        except BaseException:
            line.drop()
            raise
        return line

    def close(self) -> None:
        for waiting in self._idle.values():
            for line in waiting:
                line.drop()
        self._idle.clear()

    def _pooled(self, url: str) -> "Line | None":
        waiting = self._idle[url]
        oldest = asyncio.get_running_loop().time() - IDLE_LIMIT_S
        while waiting and waiting[0].idle_since < oldest:
            waiting.popleft().drop()
        while waiting:
            if (line := waiting.pop()).usable:
                return line
        return None

    async def _connect(self, url: str) -> "Line":
        address, loop = urlsplit(url), asyncio.get_running_loop()
        secure = address.scheme == "https"
        try:
            async with asyncio.timeout(self._connect_s):
                _, line = await loop.create_connection(
                    lambda: Line(self._idle[url].append),
                    address.hostname or "",
                    address.port or (443 if secure else 80),
                    ssl=_tls() if secure else None,
                )
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(f"{type(error).__name__}: {error}") from error
        return line


class Line(asyncio.Protocol):
    """One connection, and the request that it is busy with."""

    def __init__(self, keep: "Callable[[Line], None]") -> None:
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        # The parser looks its callbacks up once: bodies go into the list without any Python in between.
        self.on_body = self._parts.append
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._unread = 0
        self._paused = False
        self._lost = self._left = False
        self._failure: Exception | None = None
        self._heard = self._silence_s = 0.0
        self._complete = self._reusable = True
        self.status = 0
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        return not self._lost and self._failure is None and self._complete

    async def send(self, head: bytes, body: bytes, silence_s: float) -> None:
        """Raises ConnectionLost or Silence, when no status arrives."""
        if self._transport is None or self._lost:
            raise ConnectionLost("closed")
        self.status, self._complete, self._heard = 0, False, self._loop.time()
        self._silence_s = silence_s
        if self._watch is None:
            self._watch = self._loop.call_later(min(silence_s, LAST_BYTES_S), self._listen)
        self._transport.write(head + body)
        while not self.status:
            self._raise_failure()
            await self._more()

    async def read(self) -> bytes:
        """All that arrived since the last read, waiting for something; nothing at the answer's end.

        Raises ConnectionLost or Silence.
        """
        while not self._parts:
            if self._complete:
                return b""
            self._raise_failure()
            await self._more()
        data = b"".join(self._parts) if len(self._parts) > 1 else self._parts[0]
        self._parts.clear()
        self._unread = 0
        if self._paused and not self._lost and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        """Back to the pool, where the answer was read to its end; else the connection is closed."""
        if not (self.usable and self._reusable) or self._parts:
            self.drop()
            return
        self.idle_since = self._loop.time()
        self._keep(self)

    def leave(self) -> None:
        """All that matters was read: back to the pool as soon as the last bytes are here."""
        self._left = True
        self._let_go()

    def drop(self) -> None:
        self._stop_watch()
        self._lost = True
        if self._transport is not None:
            self._transport.abort()

    def _let_go(self) -> None:
        self._parts.clear()
        self._unread = 0
        if self._complete:
            self._left = False
            self.release()

    async def _more(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _listen(self) -> None:
        """One timer for many answers: it asks when something was heard last, and waits on."""
        if self._complete:
            self._watch = None
            return
        patience_s = LAST_BYTES_S if self._left else self._silence_s
        left_s = self._heard + patience_s - self._loop.time()
        # A reader that is behind has not been left alone by the engine.
        if left_s > 0 or self._parts:
            next_s = min(max(left_s, patience_s / 10), LAST_BYTES_S)
            self._watch = self._loop.call_later(next_s, self._listen)
            return
        if self._left:
            self.drop()
            return
        self._failure = Silence(f"nothing arrived for {self._silence_s:g} s")
        self._wake()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._complete:  # nobody asked
            self.drop()
            return
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._failure = ConnectionLost(f"not HTTP: {error}")
            self.drop()
        if self._left:
            self._let_go()
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
            self._stop_watch()
        elif self._failure is None:
            reason = f"{type(error).__name__}" if error else "closed"
            self._failure = ConnectionLost(reason)
        self._wake()

    # What the parser calls

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0  # 1xx announces the answer, and is none

    def on_message_complete(self) -> None:
        if self.status:
            self._complete = True
            self._reusable = self._parser.should_keep_alive()


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@lru_cache(maxsize=1024)
def _prefix(url: str, path: str) -> bytes:
    address = urlsplit(url)
    return (
        f"POST {address.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {address.netloc.rpartition('@')[2]}\r\n"
        "content-type: application/json\r\naccept: text/event-stream\r\ncontent-length: "
    ).encode()


def _head(url: str, path: str, length: int) -> bytes:
    return _prefix(url, path) + b"%d\r\n\r\n" % length
