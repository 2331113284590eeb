"""Waits for the results of commands.

trainer ── answer ─▶ Redis: result, announcement ─▶ every gateway process ─▶ the polls that wait for it
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollout_queue import clock
from rollout_queue.redis import keys

T = TypeVar("T")
BLOCK_MS = 5000
"""Redis answers a read without announcements after this time."""
LOOK_AGAIN_S = 5.0
"""A poll looks for its result so often, also without an announcement: one may be lost with a connection."""
RETRY_S = 0.5

logger = logging.getLogger(__name__)


class Announcements:
    """Wakes those who wait for a result, when it is announced. `follow` runs in a task of its own."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._waiting: dict[str, set[Callable[[], None]]] = {}

    def announce(self, request: str) -> None:
        """Wake those who wait for this request."""
        for hear in tuple(self._waiting.get(request, ())):
            hear()

    @contextmanager
    def heard(self, request: str, hear: Callable[[], None]) -> Iterator[None]:
        """Inside the block, `hear` is called at each announcement of this request."""
        self._waiting.setdefault(request, set()).add(hear)
        try:
            yield
        finally:
            waiting = self._waiting[request]
            waiting.discard(hear)
            if not waiting:
                del self._waiting[request]

    async def follow(self) -> None:
        """Read announcements, until the task is cancelled."""
        last: Any = "$"
        while True:
            try:
                streams: Any = await self._redis.xread({keys.RESULTS_ANNOUNCED: last}, 1000, BLOCK_MS)
            except (RedisError, OSError) as error:
                logger.warning("announcements of results cannot be read: %s", error)
                await clock.sleep(RETRY_S)
                continue
            for position, fields in streams[0][1] if streams else ():
                last = position
                self.announce(fields[b"r"].decode())

    async def wait(self, request: str, read: Callable[[], Awaitable[T | None]], within_s: float) -> T | None:
        """What `read` returns as soon as that is not None. None if it still is after `within_s`."""
        event = asyncio.Event()
        with self.heard(request, event.set):
            until = clock.monotonic() + within_s
            while (found := await read()) is None and (left := until - clock.monotonic()) > 0:
                with suppress(TimeoutError):
                    async with clock.timeout(min(left, LOOK_AGAIN_S)):
                        await event.wait()
                event.clear()
            return found
