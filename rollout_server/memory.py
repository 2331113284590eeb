"""Gives the memory of the engine's device to a trainer, and takes it back, at the latest after some time.

POST /memory/release ─▶ pause ─▶ idle ─▶ release KV cache, weights ─▶ the trainer has the memory, for `for_s`
POST /memory/resume, or `for_s` is over ─▶ take weights ─▶ load, prove ─▶ take KV cache ─▶ continue

One holder has the memory at a time. It may repeat both: a second release begins `for_s` anew, and a second
resume does nothing. So SGLang, which dies of a second one, never gets it. A trainer that starts again after a
crash is another holder: it asks until the former one's time is over. If anything fails, the engine is killed,
and starts with its policy once the trainer has given the memory back.
"""

import logging

from rollout_queue import clock
from rollout_server.engine.engine import Engine
from rollout_server.errors import MemoryRefused, ReloadError
from rollout_server.metrics import RolloutMetrics
from rollout_server.reloading.reload import Reloader
from rollout_server.settings import RolloutServerSettings

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""How often the time is compared."""


class EngineMemory:
    """The memory of one engine: who has it, and until when."""

    def __init__(
        self, settings: RolloutServerSettings, engine: Engine, reloader: Reloader, metrics: RolloutMetrics
    ) -> None:
        self._shared = settings.memory == "shared"
        self._engine, self._reloader, self._metrics = engine, reloader, metrics
        self._holder = ""
        self._released_at = self._until = 0.0

    async def release(self, holder: str, for_s: float) -> bool:
        """Give the memory to `holder` for this time, from now on. Returns whether it had the memory already.
        Waits while the engine loads a version. Raises MemoryRefused, also while another one's time runs."""
        if not self._shared:
            raise MemoryRefused("the engine's memory is not shared: set rollout_server.memory to shared")
        async with self._reloader.swap:
            renewed = self._engine.withheld
            if renewed and holder != self._holder and not self._is_over():
                left_s = self._until - clock.monotonic()
                raise MemoryRefused(
                    f"{self._holder} has the engine's memory for {left_s:.0f} s more, or until it asks again "
                    "or gives it back; POST /memory/resume without a holder takes it back now"
                )
            self._holder, self._until = holder, clock.monotonic() + for_s
            if not renewed:
                self._released_at = clock.monotonic()
                await self._engine.withhold()
                self._until = clock.monotonic() + for_s
                logger.info("%s has the engine's memory, for %g s", holder, for_s)
            return renewed

    async def resume(self, holder: str | None) -> None:
        """Take the memory back, if it is given away. Raises MemoryRefused if another than `holder` has it;
        None takes it from anyone."""
        async with self._reloader.swap:
            if not self._engine.withheld:
                return
            if holder not in (None, self._holder):
                raise MemoryRefused(f"{self._holder} has the engine's memory, not {holder}")
            await self._take_back()

    async def keep_time(self) -> None:
        """Take the memory back if its time is over."""
        if not self._is_over():
            return
        async with self._reloader.swap:
            if self._is_over():
                logger.warning("%s did not give the engine's memory back in its time", self._holder)
                await self._take_back()

    def _is_over(self) -> bool:
        return self._engine.withheld and clock.monotonic() >= self._until

    async def _take_back(self) -> None:
        try:
            if self._engine.released:
                await self._reloader.reoccupy()
        except ReloadError as error:
            logger.error("the engine did not take its memory again, and starts again: %s", error)
        finally:
            await self._engine.give_back()
            self._metrics.released(clock.monotonic() - self._released_at)
