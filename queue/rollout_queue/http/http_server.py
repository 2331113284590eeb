"""Runs a service's HTTP server until SIGTERM, or on a thread, with the same settings for every service.

Also: the URL at which other machines reach a port of this one.
"""

import logging
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

from rollout_queue import clock
from rollout_queue.http.bounded_protocol import (
    BoundedProtocol,
    ConnectionBounds,
    ConnectionCount,
    allow_files,
)
from rollout_queue.service_log import AccessLog

logger = logging.getLogger(__name__)


LOOPBACK_ADDRESS = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::")
ANY_PORT = 80


def http_url(host: str, port: int, wildcard: str = LOOPBACK_ADDRESS) -> str:
    """The URL of a port that is bound on `host`. If that means all addresses, the URL has `wildcard`."""
    host = wildcard if host in WILDCARDS else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def address_towards(url: str) -> str:
    """This machine's own address on the way to a URL. Nothing is sent; the URL's host may be looked up.

    Raises OSError.
    """
    parts = urlsplit(url)
    if not parts.hostname:  # a socket in the file system
        return LOOPBACK_ADDRESS
    found = socket.getaddrinfo(parts.hostname, parts.port or ANY_PORT, type=socket.SOCK_DGRAM)
    family, _, _, _, target = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


KEEP_ALIVE_S = 75
"""Clients keep an idle connection for less time (httpx and openai 5 s, aiohttp 15 s). So the client closes
the connection first, and sends no request on a connection that the server is closing."""

Leave = Callable[[], Awaitable[None]]
"""What a service does after SIGTERM, before it stops listening."""
NOT_STARTED = 3
"""The exit code of a service that could not start."""
ENDED_WITHIN_S = 5.0
"""How long requests may still take after `end_requests`; then they are cancelled."""
CLOSED_WITHIN_S = 1.0
"""How long connections may still take after that; then they are cut."""


def serve(
    app: ASGIApp,
    host: str,
    port: int,
    drain_s: float,
    leave: Leave | None = None,
    bounds: ConnectionBounds | None = None,
    end_requests: Callable[[], None] | None = None,
    sockets: Sequence[socket.socket] | None = None,
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    access_log: bool = False,
) -> None:
    """Listen until SIGTERM; then call `leave`, finish requests in flight, and exit with 0.

    If requests are still in flight after `drain_s`, `end_requests` is called (if given), so that they can
    write last words. Then the requests that are left are cancelled, and their connections are closed. Each of
    these times begins when the one before is over, so a process that stood still cuts nobody short.

    `sockets`: bound sockets to listen on, in place of `host` and `port`.

    `loop`: a service that starts many processes takes "asyncio", which uses vfork. uvloop copies the page
    tables of the service for each process, and fails where the kernel refuses so much memory.

    uvicorn ignores proxy headers here; an application that needs its own public address reads them itself.
    """
    # uvicorn drains on SIGTERM and then raises the signal again, for the handler that was set before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        AccessLog(app) if access_log else app,
        host=host,
        port=port,
        loop=loop,
        timeout_graceful_shutdown=None,  # `_Server` ends what is left
        **_of_connections(bounds or ConnectionBounds()),
    )
    with suppress(KeyboardInterrupt):  # uvicorn raises SIGINT again, too
        server = _Server(config, drain_s, leave, end_requests)
        server.run(None if sockets is None else list(sockets))
        if not server.started:  # its lifespan has failed, and the log says why
            sys.exit(NOT_STARTED)


class HttpThread:
    """Serves the app on a thread, as long as the `with` block runs."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        own = _of_connections(ConnectionBounds())
        config = uvicorn.Config(app, host=host, port=port, log_level="warning", **own)
        self._server = uvicorn.Server(config)
        # The main thread binds the address. If the address is in use, uvicorn then ends the whole process.
        self._socket = config.bind_socket()
        # uvicorn installs signal handlers only on the main thread.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._server.run, [self._socket]), name="http", daemon=True
        )

    def __enter__(self) -> "HttpThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()


def _of_connections(bounds: ConnectionBounds) -> dict[str, Any]:
    """uvicorn's settings of connections. This process may then open as many files as they need."""
    return {
        "http": partial(BoundedProtocol, ConnectionCount(allow_files(bounds))),
        "ws": "none",
        "server_header": False,
        "proxy_headers": False,
        "log_config": None,
        "access_log": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
    }


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        drain_s: float,
        leave: Leave | None,
        end_requests: Callable[[], None] | None,
    ) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._leave = leave
        self._end_requests = end_requests
        self._cut_off = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            if self._leave is not None:
                await self._leave()
                await clock.sleep(clock.LAST_LOOK_S)  # what came while this process stood still is answered
        finally:
            clock.deadline(self._drain_s, self._end)
            await super().shutdown(sockets)
            if self._cut_off:  # uvicorn then leaves this out
                await self.lifespan.shutdown()

    def _end(self) -> None:
        if self._end_requests is None:
            self._cancel()
            return
        self._end_requests()
        clock.deadline(ENDED_WITHIN_S, self._cancel)

    def _cancel(self) -> None:
        if tasks := self.server_state.tasks:
            logger.error("%d requests have not ended in time, and are cancelled", len(tasks))
        for task in tasks:
            task.cancel()
        clock.call_later(CLOSED_WITHIN_S, self._cut)

    def _cut(self) -> None:
        """Wait no longer: uvicorn ends its waiting, and closes what is left."""
        self._cut_off = self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()
