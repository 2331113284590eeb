"""What servers do in a push, on its way to Redis: what is noted while a write runs goes with the next."""

import asyncio
import logging

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.serving_plan import ServerPush
from rollout_queue.redis.plan_store import ServingRegister

logger = logging.getLogger(__name__)


class ServerNotes:
    """The last note of each server that is not in Redis yet."""

    def __init__(self, serving: ServingRegister) -> None:
        self._serving = serving
        self._waiting: dict[str, ServerPush] = {}
        self._one = asyncio.Lock()

    def put(self, noted: ServerPush) -> None:
        """Have the next write store it."""
        self._waiting[noted.server] = noted

    async def write(self) -> None:
        """Store what waits, also what is noted meanwhile. If Redis fails, it goes with a later write."""
        async with self._one:
            while self._waiting:
                written, self._waiting = self._waiting, {}
                try:
                    await self._serving.note_servers(written.values())
                except StorageUnavailable as error:
                    self._waiting = written | self._waiting
                    logger.warning("what %d servers do in the push is not stored: %s", len(written), error)
                    return

    def forget(self) -> None:
        """Another process notes from now on."""
        self._waiting.clear()
