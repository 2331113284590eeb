"""Retention: removes settled sessions (with a verdict) after `retention_s`, or earlier if Redis fills up.

Redis' memory:   0 ─────────── LOW ─ HIGH ────── queue_memory ────────────── maxmemory
                 by age alone     ◀── early      no new sessions are opened  nothing is stored

To forget a session is to remove its records. The counters of verdicts still count it.
"""

import logging
from collections import Counter

from redis.asyncio import Redis

from gateway.metrics.metrics import Metrics
from gateway.settings.service import GatewaySettings
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.retention import Forgotten, RedisForgetter

logger = logging.getLogger(__name__)

BATCH = 100
BATCHES = 10
"""The most batches in one pass; other sessions wait for the next pass."""
LOW, HIGH = 0.95, 0.98
"""Shares of `limits.queue_memory`. Once memory is above HIGH, sessions are forgotten early until it is below
LOW, so that new sessions need not be refused for lack of memory."""
DEFAULT_MEMORY = 0.9
"""Used if `limits.queue_memory` is null, because a full Redis stores nothing."""
MIN_AGE_S = 60.0
"""A session is kept this long after its verdict (or for `retention_s`, if that is shorter), however full
Redis is: clients read the verdict, and repeat calls whose answer they lost. A Redis that cannot hold the
sessions of this time is too small for the deployment."""

NONE_FORGOTTEN = Forgotten(Counter(), 0, "")


class Retention:
    """Forgets settled sessions, a bounded number in each pass. Several gateways may do this at once."""

    def __init__(self, settings: GatewaySettings, redis: Redis, metrics: Metrics) -> None:
        self._redis, self._metrics = redis, metrics
        self._keep_s = settings.retention_s
        self._full = settings.limits.queue_memory or DEFAULT_MEMORY
        self._forgetter = RedisForgetter(redis)
        self._early = False
        """Whether sessions are forgotten early: memory was above HIGH, and has not been below LOW since."""
        self._logged_entry = ""
        """The entry of the stream that the last warning named; empty if sessions can be forgotten."""

    async def refresh(self) -> None:
        """One pass. Raises StorageUnavailable."""
        if self._keep_s is None:
            return
        await self._forgetter.adopt()
        for _ in range(BATCHES):
            aged = await self._forgetter.forget(self._keep_s, BATCH)
            early = NONE_FORGOTTEN
            if await self._is_full():
                early = await self._forgetter.forget(min(MIN_AGE_S, self._keep_s), BATCH)
                self._log_obstacle(early)
            self._report(aged.verdicts, early.verdicts)
            if max(aged.due, early.due) < BATCH:
                return

    async def _is_full(self) -> bool:
        memory: dict[str, int] = await stored(self._redis.info("memory"))
        maximum = memory.get("maxmemory", 0)
        used = memory.get("used_memory", 0) / maximum / self._full if maximum else 0.0
        self._early = used >= HIGH or (self._early and used > LOW)
        return self._early

    def _log_obstacle(self, early: Forgotten) -> None:
        entry = "" if early.due else early.held_by
        if entry and entry != self._logged_entry:
            logger.warning(
                "Redis fills up, and no settled session can be forgotten: entry %s of %s is older than all of"
                " them, and waits for a trainer or for the end of its session",
                entry,
                keys.STREAM,
            )
        self._logged_entry = entry

    def _report(self, aged: Counter[str], early: Counter[str]) -> None:
        self._metrics.forgotten.labels("age").inc(aged.total())
        self._metrics.forgotten.labels("memory").inc(early.total())
        if forgotten := aged + early:
            how = ", ".join(f"{number} {code}" for code, number in forgotten.most_common())
            logger.info(
                "forgot %d settled sessions, %d of them early because Redis fills up: %s",
                forgotten.total(),
                early.total(),
                how,
            )
