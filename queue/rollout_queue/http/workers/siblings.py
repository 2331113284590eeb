"""Asks the other workers of a service, over their Unix sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from rollout_queue import clock
from rollout_queue.http.workers.worker import unix_socket

logger = logging.getLogger(__name__)

ASK_S = 5.0
"""How long a worker may take to answer a question. Later it counts as one that does not answer."""
SILENT_S = 30.0
"""The parent process kills a worker that has not answered for this long."""
HUNG_S = SILENT_S + 2 * ASK_S
"""A worker that has not answered a question by then has been killed. So a question that must not be missed
waits this long: a worker that stood still for a while answers it."""
CONNECT = httpx.Timeout(None, connect=HUNG_S)


class Siblings:
    """The workers of one service that can be asked; none if it is a single process."""

    def __init__(self, folder: Path = Path(), numbers: Sequence[int] = ()) -> None:
        limits = httpx.Limits(max_connections=None)  # each belongs to a call, and calls are bounded
        self._clients = {
            number: httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(unix_socket(folder, number)), limits=limits),
                base_url="http://worker",
            )
            for number in numbers
        }

    @property
    def numbers(self) -> Sequence[int]:
        return list(self._clients)

    async def ask(self, path: str, question: bytes = b"", within_s: float = ASK_S) -> dict[int, bytes]:
        """Put a question to every worker at once. Returns the answers with status 200, by worker."""
        if not self._clients:
            return {}
        answers = await asyncio.gather(
            *(self._ask(number, path, question, within_s) for number in self._clients)
        )
        return {
            number: answer
            for number, answer in zip(self._clients, answers, strict=True)
            if answer is not None
        }

    @asynccontextmanager
    async def stream(self, number: int, path: str, question: bytes) -> AsyncIterator[httpx.Response]:
        """An answer that may take any time. Raises httpx.TransportError if the worker does not answer."""
        client = self._clients[number]
        async with client.stream("POST", path, content=question, timeout=CONNECT) as answer:
            yield answer

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def _ask(self, number: int, path: str, question: bytes, within_s: float) -> bytes | None:
        try:
            async with clock.timeout(within_s):
                answer = await self._clients[number].post(path, content=question, timeout=None)
        except (httpx.TransportError, TimeoutError) as error:
            logger.warning("worker %d did not answer %s: %r", number, path, error)
            return None
        return answer.content if answer.status_code == 200 else None
