"""Runs a service's HTTP server until SIGTERM, with the same settings for every service."""

import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from rollout_queue.http.bounded_protocol import BoundedProtocol
from rollout_queue.http.connections import ConnectionBounds, ConnectionCount, allow_files

KEEP_ALIVE_S = 75
"""Clients keep an idle connection for less time (httpx and openai 5 s, aiohttp 15 s). So the client closes
the connection first, and sends no request on a connection that the server is closing."""

Leave = Callable[[], Awaitable[None]]
"""What a service does after SIGTERM, before it stops listening."""


def serve(
    app: ASGIApp,
    host: str,
    port: int,
    drain_s: float,
    leave: Leave | None = None,
    bounds: ConnectionBounds | None = None,
) -> None:
    """Listen until SIGTERM; then call `leave`, finish requests in flight, and exit with 0.

    uvicorn ignores proxy headers here; an application that needs its own public address reads them itself.
    """
    # uvicorn drains on SIGTERM and then raises the signal again, for the handler that was set before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    count = ConnectionCount(allow_files(bounds or ConnectionBounds()))
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=cast(Any, partial(BoundedProtocol, count)),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_s),
    )
    with suppress(KeyboardInterrupt):  # uvicorn raises SIGINT again, too
        _Server(config, leave).run()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, leave: Leave | None) -> None:
        super().__init__(config)
        self._leave = leave

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            if self._leave is not None:
                await self._leave()
        finally:
            await super().shutdown(sockets)
