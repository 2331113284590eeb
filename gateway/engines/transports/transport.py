"""The interface of the HTTP client that streams answers from engines: two protocols and three errors.

EngineTransport ──post──▶ EngineResponse ──read, read, …──▶ b""
├─ HttptoolsTransport    the gateway's own, the default
└─ AiohttpTransport      the library's
"""

import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

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


class SocketOptions(Protocol):
    """What `keep_alive` needs of a socket."""

    def setsockopt(self, level: int, name: int, value: int, /) -> None: ...


def keep_alive(connection: SocketOptions) -> None:
    """Let the kernel check the other end of a connection while no bytes flow."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class ConnectFailed(Exception):
    """No connection could be made."""


class ConnectionLost(Exception):
    """The connection ended before the answer did."""


class ReadTimedOut(Exception):
    """Nothing arrived for longer than the read timeout."""


class EngineResponse(Protocol):
    """One answer as it arrives. The caller of `post` calls `release` or `leave` exactly once."""

    @property
    def status(self) -> int: ...

    async def read(self) -> bytes:
        """All bytes that arrived since the last read; waits for at least one. Empty at the answer's end.

        Raises ConnectionLost or ReadTimedOut.
        """
        ...

    def release(self) -> None:
        """Give the connection back to the pool if the answer was read to its end; otherwise close it."""
        ...

    def leave(self) -> None:
        """Discard the rest of the answer. Give the connection back once the rest has arrived."""
        ...


class EngineTransport(Protocol):
    """An HTTP client that posts JSON and streams the answer."""

    async def post(self, url: str, path: str, body: bytes, trace: str | None = None) -> EngineResponse:
        """Send the body; returns when the answer's status has arrived. `trace` is the header `traceparent`.

        Raises ConnectFailed, ConnectionLost or ReadTimedOut.
        """
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...
