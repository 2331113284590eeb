"""Waits until replicas have a record, before its caller is told that it is stored.

append ─▶ answer ─▶ WAIT on the same connection ─▶ the caller hears the answer

WAIT counts the replicas that have everything which this connection has written. While it waits, Redis serves
nothing else of the connection. So one WAIT stands for all appends that were answered before it was sent.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from redis.exceptions import TimeoutError as RedisTimeoutError


class Replication(NamedTuple):
    """How many replicas must have a record, and how long they may take. Of 0 replicas nothing is asked."""

    replicas: int = 0
    timeout_s: float = 1.0

    @property
    def command(self) -> tuple[str, str, str]:
        return "WAIT", str(self.replicas), str(max(1, round(self.timeout_s * 1000)))

    def require(self, confirmed: int) -> None:
        """Raises redis' TimeoutError: the record is stored, and its caller must not be told so."""
        if confirmed < self.replicas:
            raise RedisTimeoutError(
                f"{confirmed} of {self.replicas} replicas have the record after {self.timeout_s:g} s"
            )


NO_REPLICAS = Replication()


class SharedWait:
    """Sends one WAIT for all callers that came while the one before was under way."""

    def __init__(self, send: Callable[[], Awaitable[int]]) -> None:
        self._send = send
        self._running: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None

    async def after_now(self) -> int:
        """What a WAIT returns that is sent from now on."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
            self._next.add_done_callback(_retrieved)
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        for task in (self._running, self._next):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self, before: asyncio.Task[int] | None) -> int:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._send()


def _retrieved(task: asyncio.Task[int]) -> None:
    """Retrieve the exception, so that asyncio logs no warning when every waiting caller was cancelled."""
    if not task.cancelled():
        task.exception()
