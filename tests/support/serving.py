"""Runs an ASGI application on a real port, in a thread, for as long as a test needs it."""

import fcntl
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import uvicorn

from rollout_queue.http.bounded_protocol import BoundedProtocol
from rollout_queue.http.connections import ConnectionBounds, ConnectionCount
from rollout_queue.http.server import KEEP_ALIVE_S

CLAIMS = Path(tempfile.gettempdir()) / f"weir-test-ports-{os.getuid()}"
PORTS = range(10_000, 32_000)
"""These ports lie below the range from which Linux takes the ports of outgoing connections."""
ENDS_WITHIN_S = 120.0
_claims: list[TextIO] = []


def free_port() -> int:
    """A loopback port that no process listens on, and that no other test process gets while this one runs."""
    CLAIMS.mkdir(exist_ok=True)
    while True:
        port = PORTS[secrets.randbelow(len(PORTS))]
        claim = (CLAIMS / str(port)).open("w", encoding="ascii")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until our process ends
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:  # another test process has claimed it, or some other program uses it
            claim.close()
            continue
        _claims.append(claim)
        return port


class _Server(uvicorn.Server):
    """Sets `begun` when the server accepts calls, or when its start has failed."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun = threading.Event()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            self.begun.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.begun.set()


@contextmanager
def serving(
    app: Any,
    port: int | None = None,
    listener: socket.socket | None = None,
    loop: Literal["auto", "asyncio"] = "auto",
    bounds: ConnectionBounds | None = None,
) -> Iterator[str]:
    """Serve `app` on loopback and give its URL. The application's lifespan starts and ends, too. With a
    `listener`, calls come from there instead. With `bounds`, connections are bounded as a service's are."""
    port = port or free_port()
    bounded = partial(BoundedProtocol, ConnectionCount(bounds)) if bounds else "auto"
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        loop=loop,
        http=cast(Any, bounded),
        log_level="warning",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEEP_ALIVE_S,
        proxy_headers=False,
    )
    server = _Server(config)
    listeners = [listener] if listener else None
    # The thread has the clock of whoever calls.
    thread = threading.Thread(target=copy_context().run, args=(server.run, listeners), daemon=True)
    thread.start()
    server.begun.wait()
    if not server.started:
        raise RuntimeError("the application did not start")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(ENDS_WITHIN_S)
