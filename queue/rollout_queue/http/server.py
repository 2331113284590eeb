"""How a service listens: the same manners for all of them."""

import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection (httpx and openai 5 s, aiohttp 15 s): they close it first, so
that no request meets a connection that is just being closed."""

Leave = Callable[[], Awaitable[None]]
"""What a service does once it is told to end, while it still listens."""


def serve(app: ASGIApp, host: str, port: int, drain_s: float, leave: Leave | None = None) -> None:
    """Listen until SIGTERM; then `leave`, finish what is in flight, and exit with 0.

    An application that says its own address heeds what a proxy says of it by itself.
    """
    # uvicorn drains on SIGTERM and then raises the signal again, for whoever handled it before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_s),
    )
    with suppress(KeyboardInterrupt):  # raised again, as SIGTERM is
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
