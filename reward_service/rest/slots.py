"""A bounded number of requests at once, and a bounded number that wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout_queue.http.errors import ApiError


class Slots:
    """Admits `at_once` requests; `waiting` more wait, and any further one is refused."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._most = at_once + waiting
        self.taken = 0
        """Requests that are admitted or wait."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Raises ApiError (429)."""
        if self.taken >= self._most:
            raise ApiError(429, f"{self.taken} requests are being graded, and no more may wait")
        self.taken += 1
        try:
            async with self._free:
                yield
        finally:
            self.taken -= 1
