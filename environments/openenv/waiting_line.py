"""Lets episodes wait for a place while the server is full: who came first is first to try again.

A refused episode holds no connection. It tries again when an episode of this run has ended, and from time to
time, because others use the server, too.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from environments.errors import EnvironmentFault
from environments.openenv.connection import ServerIsFull
from environments.session_client import pause_after
from rollout_queue import clock

T = TypeVar("T")


class WaitingLine:
    """`waits_s` is how long the server may let nobody in."""

    def __init__(self, waits_s: float) -> None:
        self._waits_s = waits_s
        self._line: deque[asyncio.Event] = deque()
        self._let_in_at = 0.0

    async def enter(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`, made again while it raises ServerIsFull. Raises EnvironmentFault."""
        if not self._line:
            try:
                return await self._try(attempt)
            except ServerIsFull:
                pass
        turn = asyncio.Event()
        self._line.append(turn)
        try:
            return await self._wait(attempt, turn)
        finally:
            self._line.remove(turn)
            self.freed()  # there may be room for the next one, too

    def freed(self) -> None:
        """There may be room: the first one in the line tries now."""
        if self._line:
            self._line[0].set()

    async def _wait(self, attempt: Callable[[], Awaitable[T]], turn: asyncio.Event) -> T:
        began, refused = clock.monotonic(), 0
        while True:
            if await _within(turn, pause_after(refused)):
                refused = 0
            turn.clear()
            if self._line[0] is not turn:  # others came first
                continue
            try:
                return await self._try(attempt)
            except ServerIsFull as full:
                refused += 1
                if clock.monotonic() - max(began, self._let_in_at) > self._waits_s:
                    raise EnvironmentFault(
                        f"the server has let nobody in for {self._waits_s:.0f} s: {full}"
                    ) from None

    async def _try(self, attempt: Callable[[], Awaitable[T]]) -> T:
        result = await attempt()
        self._let_in_at = clock.monotonic()
        return result


async def _within(turn: asyncio.Event, seconds: float) -> bool:
    try:
        async with clock.timeout(seconds):
            await turn.wait()
    except TimeoutError:
        return False
    return True
