"""The server with which a worker answers the other workers and the parent process."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from rollout_queue.http.server import KEEP_ALIVE_S
from rollout_queue.http.workers.worker import Worker, unix_socket


class _WithoutSignals(uvicorn.Server):
    """A server beside the service's own, which alone obeys signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def private_server(worker: Worker, app: ASGIApp) -> AsyncIterator[None]:
    """Serve `app` on the worker's Unix socket while the block runs. Only this user can reach it."""
    path = unix_socket(worker.folder, worker.number)
    config = uvicorn.Config(
        app,
        uds=str(path),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    server = _WithoutSignals(config)
    serving = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        server.should_exit = True
        await serving
