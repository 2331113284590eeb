"""Lets so many at once work. Owners, such as client keys, take turns: much work of one delays no other."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class FairTurns:
    """A semaphore whose waiting owners take turns; those of one owner go in the order of their arrival."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """By owner, the next one first."""
        self._last_owner: Hashable = None
        """Who had the last turn."""

    @asynccontextmanager
    async def of(self, owner: Hashable) -> AsyncIterator[None]:
        """A block that runs when it is its owner's turn."""
        await self._come(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _come(self, owner: Hashable) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came just when the caller left
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        if self._last_owner in self._waiting:
            self._waiting[self._last_owner] = self._waiting.pop(self._last_owner)
        while self._waiting:
            owner, line = next(iter(self._waiting.items()))
            turn = line.popleft()
            if not line:
                del self._waiting[owner]
            if not turn.done():  # else its caller has left
                self._last_owner = owner
                turn.set_result(None)
                return
        self._free += 1
