"""Keeps the lease of the push driver: a task of its own renews it, however long a step takes."""

import asyncio
import logging
from collections.abc import Callable

from gateway.cancellation import cancel_and_wait
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis.plan_store import PushLease

logger = logging.getLogger(__name__)


class KeptLease:
    """Claimed by `hold`, and kept until `release`, or until another process has it."""

    def __init__(self, lease: PushLease, lease_s: float, lost: Callable[[], None]) -> None:
        """`lost` is called when the lease is not held any more."""
        self._lease, self._lease_s, self._lost = lease, lease_s, lost
        self._until = float("-inf")
        self._keeping: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        return clock.monotonic() < self._until

    async def hold(self) -> bool:
        """Claim or renew the lease. Returns whether this process holds it now. Raises StorageUnavailable."""
        await self._renew()
        if self.held and (self._keeping is None or self._keeping.done()):
            self._keeping = asyncio.create_task(self._keep(), name="lease of pushes")
        return self.held

    async def release(self) -> None:
        """Let another process claim the lease at once. Raises StorageUnavailable."""
        if self._keeping is not None:
            await cancel_and_wait([self._keeping])
        self._until = float("-inf")
        await self._lease.release()

    async def _renew(self) -> None:
        began_at = clock.monotonic()
        held = await self._lease.hold()
        self._until = began_at + self._lease_s if held else float("-inf")

    async def _keep(self) -> None:
        while self.held:
            await clock.sleep(self._lease_s / 3)
            try:
                await self._renew()
            except StorageUnavailable as error:
                logger.warning("the lease of pushes is not renewed: %s", error)
        self._lost()
