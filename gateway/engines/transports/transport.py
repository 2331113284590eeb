"""What the HTTP clients to engines and rollout servers share: limits, TCP keep-alive and errors."""

import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

import aiohttp

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


def engine_connector(idle_limit_s: float) -> aiohttp.TCPConnector:
    """Connections of aiohttp to engines and rollout servers: as many as calls need, with TCP keep-alive."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_limit_s, socket_factory=_open_socket)


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    keep_alive(opened)
    return opened


class ConnectFailed(Exception):
    """No connection could be made."""


class ConnectionLost(Exception):
    """The connection ended before the answer did."""


class ReadTimedOut(Exception):
    """Nothing arrived for longer than the read timeout."""
