"""The rolling order of a push: only some servers load at once, so that the others take the calls."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class LoadSlots:
    """Lets a server load once few enough others do."""

    def __init__(self, max_unavailable: float, live: Callable[[], int]) -> None:
        """`max_unavailable` is a share of the live servers, whose number `live` returns."""
        self._max_unavailable = max_unavailable
        self._live = live
        self._loading = 0
        self._changed = asyncio.Condition()

    @property
    def allowed(self) -> int:
        """How many servers may load at once: at least one."""
        return max(1, int(self._max_unavailable * self._live()))

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for a slot, and have it while the block runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._loading < self.allowed)
            self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1
            async with self._changed:
                self._changed.notify_all()
