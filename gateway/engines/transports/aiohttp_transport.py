"""Streams the engines' answers with the HTTP client of aiohttp."""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import aiohttp

from gateway.engines.transports.transport import (
    CONNECT_TIMEOUT_S,
    IDLE_LIMIT_S,
    LAST_BYTES_S,
    NO_HEADERS,
    ConnectFailed,
    ConnectionLost,
    ReadTimedOut,
    keep_alive,
)
from rollout_queue import clock

HEADERS = {
    "content-type": "application/json",
    "accept": "text/event-stream",
    "accept-encoding": "identity",
}


def engine_connector(idle_limit_s: float) -> aiohttp.TCPConnector:
    """Connections to engines and rollout servers: as many as calls need, with TCP keep-alive."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_limit_s, socket_factory=_open_socket)


class AiohttpTransport:
    """A pool of connections. `read_timeout_s` is the longest wait for a next byte."""

    def __init__(
        self,
        read_timeout_s: float,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        idle_limit_s: float = IDLE_LIMIT_S,
        last_bytes_s: float = LAST_BYTES_S,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        self._session = aiohttp.ClientSession(
            connector=engine_connector(idle_limit_s),
            timeout=aiohttp.ClientTimeout(sock_connect=connect_timeout_s, sock_read=read_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={**HEADERS, **headers},
        )
        self._last_bytes_s = last_bytes_s
        self._leaving: set[asyncio.Task[None]] = set()

    async def post(self, url: str, path: str, body: bytes, trace: str | None = None) -> "AiohttpResponse":
        """As `EngineTransport.post`."""
        headers = None if trace is None else {"traceparent": trace}
        with _translated():
            response = await self._session.post(
                url.rstrip("/") + path, data=body, headers=headers, allow_redirects=False
            )
        return AiohttpResponse(self, response)

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._session.close()

    def discard(self, response: aiohttp.ClientResponse) -> None:
        """Read an answer to its end in the background."""
        task = asyncio.create_task(self._discard(response))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _discard(self, response: aiohttp.ClientResponse) -> None:
        try:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with clock.timeout(self._last_bytes_s):
                    while await response.content.readany():
                        pass
        finally:
            response.release()


class AiohttpResponse:
    """One answer as it arrives."""

    def __init__(self, transport: AiohttpTransport, response: aiohttp.ClientResponse) -> None:
        self._transport = transport
        self._response = response
        self.status = response.status

    async def read(self) -> bytes:
        """As `EngineResponse.read`."""
        with _translated():
            return await self._response.content.readany()

    def release(self) -> None:
        self._response.release()

    def leave(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._transport.discard(self._response)


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    keep_alive(opened)
    return opened


@contextmanager
def _translated() -> Iterator[None]:
    """Turns aiohttp's errors into those of `transport.py`."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise ConnectFailed(f"{type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise ReadTimedOut(str(error) or type(error).__name__) from error
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionLost(f"{type(error).__name__}: {error}") from error
