"""What the page shows live: one picture of the deployment at a time, for everybody who looks.

viewer ─▶ `LiveFeed.events` ─┬─ waits for the next picture
viewer ─▶ `LiveFeed.events` ─┘        one task makes it every `every_s`, while there is a viewer

A viewer that reads slowly gets the newest picture next, and none of those between: nothing queues up.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.cancellation import cancel_and_wait
from gateway.errors import LimitReached
from gateway.prometheus import Metrics
from rollout_queue import clock

logger = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""How long a stream is silent at most: proxies close silent connections."""
RETRY_MS = 2000
RETRY_S = 5
"""When a viewer beyond the bound may try again."""


class LiveFeed:
    """Makes pictures, and hands them to the viewers."""

    def __init__(
        self, picture: Callable[[], Awaitable[bytes]], every_s: float, viewers: int, metrics: Metrics
    ) -> None:
        """`picture` returns the bytes of one server-sent event."""
        self._picture = picture
        self._every_s = every_s
        self._most, self._metrics = viewers, metrics
        self.viewers = 0
        self.pictures = 0
        """How many were made."""
        self._newest = b""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def admit(self) -> None:
        """Count one more viewer, until `leave`. Raises LimitReached if there are too many."""
        if self._closed or self.viewers >= self._most:
            message = f"{self.viewers} browsers look at the page, and this gateway serves no more at once"
            raise self._metrics.refused(LimitReached(message, code="viewers_limit", retry_s=RETRY_S))
        self.viewers += 1

    def leave(self) -> None:
        self.viewers -= 1

    async def events(self, may_look: Callable[[], Awaitable[bool]]) -> AsyncIterator[bytes]:
        """The events of a viewer who was admitted, until the feed is closed, or `may_look` says no before an
        event."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        yield f"retry: {RETRY_MS}\n\n".encode()
        seen = 0 if self._newest else self.pictures
        while not self._closed:
            changed = await self._wait(seen)
            if self._closed or not await may_look():
                break
            seen = self.pictures if changed else seen
            yield self._newest if changed else b": still here\n\n"
        yield b"event: end\ndata: {}\n\n"

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        self._tell()

    async def aclose(self) -> None:
        """End every stream, and the task."""
        self.close()
        if self._task is not None:
            await cancel_and_wait([self._task])

    async def _wait(self, seen: int) -> bool:
        """Wait for a picture after number `seen`, or until a heartbeat is due; whether there is one."""
        if self._closed or self.pictures != seen:
            return True
        try:
            async with clock.timeout(HEARTBEAT_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _run(self) -> None:
        while self.viewers and not self._closed:
            try:
                self._newest = await self._picture()
            except Exception:  # outermost frame of the task: the next picture may succeed
                logger.exception("no picture of the deployment could be made")
            else:
                self.pictures += 1
                self._tell()
            await clock.sleep(self._every_s)
        self._newest = b""

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
