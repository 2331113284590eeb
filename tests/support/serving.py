"""Runs an ASGI application on a real port, in a thread, for as long as a test needs it."""

import asyncio
import fcntl
import logging
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, cast

import httpx
import uvicorn

from rollout_queue.http.bounded_protocol import BoundedProtocol, ConnectionBounds, ConnectionCount
from rollout_queue.http.http_server import KEEP_ALIVE_S

T = TypeVar("T")
CLAIMS = Path(tempfile.gettempdir()) / f"weir-test-ports-{os.getuid()}"
PORTS = range(10_000, 32_000)
"""These ports lie below the range from which Linux takes the ports of outgoing connections."""
ENDS_WITHIN_S = 120.0
# Once here: uvicorn would do it for each application, which takes 17 ms.
logging.getLogger("uvicorn").setLevel(logging.WARNING)
_claims: list[TextIO] = []


def free_port(bus: int = 0) -> int:
    """A loopback port that no process listens on, and that no other test process gets while this one runs.
    So is the one that is `bus` higher."""
    CLAIMS.mkdir(exist_ok=True)
    while True:
        port = PORTS[secrets.randbelow(len(PORTS) - bus)]
        if _claimed(port) and (not bus or _claimed(port + bus)):
            return port


def _claimed(port: int) -> bool:
    claim = (CLAIMS / str(port)).open("w", encoding="ascii")
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until our process ends
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError:  # another test process has claimed it, or some other program uses it
        claim.close()
        return False
    _claims.append(claim)
    return True


NOBODY = f"http://127.0.0.1:{free_port()}"
"""Nothing listens at this address."""


class _Server(uvicorn.Server):
    """Sets `begun` when the server accepts calls, or when its start has failed."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._ends: asyncio.Future[None] | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            with suppress(asyncio.CancelledError):  # it was killed
                super().run(sockets)
        finally:
            self.begun.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        self._ends = self.loop.create_future()
        await super().startup(sockets)
        self.begun.set()

    async def main_loop(self) -> None:
        """As uvicorn's, which looks only every 0.1 s whether it shall end."""
        assert self._ends is not None
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            await asyncio.wait([self._ends], timeout=0.1)

    def end(self) -> None:
        """Let running requests end, and then the application."""
        self.should_exit = True
        if self.loop is not None and self._ends is not None:
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self._wake, self._ends)

    @staticmethod
    def _wake(ends: asyncio.Future[None]) -> None:
        if not ends.done():
            ends.set_result(None)

    async def break_off(self, clients: Iterable[httpx.AsyncClient]) -> None:
        """Break connections, with those of `clients`, and end what the application does."""
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task(), self._main}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for client in clients:
            await client.aclose()
        assert self._main is not None
        self._main.cancel()


class Served:
    """An application on loopback, in a thread with its own event loop. A test may end it, kill it, and let
    it stand still, as it may do with a process."""

    def __init__(
        self,
        app: Any,
        port: int | None = None,
        listener: socket.socket | None = None,
        loop: Literal["auto", "asyncio"] = "auto",
        bounds: ConnectionBounds | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        """`listener` and `bounds` as with `serving`. `ended` is called at the end, in the thread."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        bounded = partial(BoundedProtocol, ConnectionCount(bounds)) if bounds else "auto"
        config = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=self.port,
            loop=loop,
            http=cast(Any, bounded),
            log_config=None,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=KEEP_ALIVE_S,
            proxy_headers=False,
        )
        self._server = _Server(config)
        self._goes_on = threading.Event()
        self._goes_on.set()

        def run() -> None:
            try:
                self._server.run([listener] if listener else None)
            finally:
                ended()

        # The thread has the clock of whoever calls.
        self._thread = threading.Thread(target=copy_context().run, args=(run,), daemon=True)
        self._thread.start()
        self._server.begun.wait()
        if not self._server.started:
            raise RuntimeError("the application did not start")

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def suspend(self) -> None:
        """Let the loop stand still. The kernel still accepts connections and bytes for it."""
        self._goes_on.clear()
        stands = threading.Event()

        def stand() -> None:
            stands.set()
            self._goes_on.wait()

        self._call(stand)
        stands.wait(ENDS_WITHIN_S)

    def resume(self) -> None:
        self._goes_on.set()

    def end(self) -> None:
        """Let running requests end, within 2 s, and then the application."""
        self._server.end()

    def kill(self, *clients: httpx.AsyncClient) -> None:
        """End at once: connections break, also those of `clients`, and the lifespan does not end in order."""
        self.resume()
        loop = self._server.loop
        assert loop is not None
        self._call(lambda: loop.create_task(self._server.break_off(clients)))

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(ENDS_WITHIN_S)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this in the application's loop, and wait for it."""
        assert self._server.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._server.loop).result(ENDS_WITHIN_S)

    def _call(self, callback: Callable[[], object]) -> None:
        assert self._server.loop is not None
        with suppress(RuntimeError):  # the loop has ended
            self._server.loop.call_soon_threadsafe(callback)


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
    served = Served(app, port, listener, loop, bounds)
    try:
        yield served.url
    finally:
        served.end()
        served.join()
