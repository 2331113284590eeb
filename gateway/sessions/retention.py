"""How long settled sessions are kept: so many seconds, or less where Redis fills up.

Redis' memory:   0 ─────────── LOW ─ HIGH ─ queue_memory ─ maxmemory
                 by age alone    ◀── early   newcomers wait   everybody does
"""

import logging
from collections import Counter
from typing import Any

from redis.asyncio import Redis

from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.retention import Forgotten, RedisForgetter

logger = logging.getLogger(__name__)

BATCH = 100
BATCHES = 10
"""In one pass; what is left waits for the next one."""
LOW, HIGH = 0.95, 0.98
"""Shares of `limits.queue_memory`. Above the one, sessions are forgotten early, before newcomers are turned
away for them; below the other, no more of them."""
NO_LIMIT = 0.9
"""In place of `limits.queue_memory` where that is null: a full Redis would refuse everybody."""
ASKED_FOR_S = 60.0
"""However full Redis is, so long anybody may still ask what became of a session, and a client that lost an
answer may ask again. Who settles more than Redis holds in that time needs a larger one."""

NOTHING = Forgotten(Counter(), 0, "")


class Retention:
    """Forgets, a bounded number of sessions a pass. Any number of gateways may do it at once."""

    def __init__(self, settings: GatewaySettings, redis: Redis, metrics: Metrics) -> None:
        self._redis, self._metrics = redis, metrics
        self._keep_s = settings.retention_s
        self._full = settings.limits.queue_memory or NO_LIMIT
        self._forgetter = RedisForgetter(redis)
        self._early = False
        """Whether Redis has been too full since it last was not."""
        self._held_by = ""

    async def refresh(self) -> None:
        """One pass. Raises StorageUnavailable."""
        if self._keep_s is None:
            return
        await self._forgetter.adopt()
        for _ in range(BATCHES):
            aged = await self._forgetter.forget(self._keep_s, BATCH)
            early = NOTHING
            if await self._is_full():
                early = await self._forgetter.forget(min(ASKED_FOR_S, self._keep_s), BATCH)
                self._tell_what_holds(early)
            self._tell(aged.verdicts, early.verdicts)
            if max(aged.due, early.due) < BATCH:
                return

    async def _is_full(self) -> bool:
        memory: Any = await stored(self._redis.info("memory"))
        most = memory.get("maxmemory", 0)
        used = memory.get("used_memory", 0) / most / self._full if most else 0.0
        self._early = used >= HIGH or (self._early and used > LOW)
        return self._early

    def _tell_what_holds(self, early: Forgotten) -> None:
        held_by = "" if early.due else early.held_by
        if held_by and held_by != self._held_by:
            logger.warning(
                "Redis fills up, and no settled session may go: entry %s of %s is older than all of them, and"
                " waits for a trainer or for its session",
                held_by,
                keys.STREAM,
            )
        self._held_by = held_by

    def _tell(self, aged: Counter[str], early: Counter[str]) -> None:
        self._metrics.forgotten.labels("age").inc(aged.total())
        self._metrics.forgotten.labels("memory").inc(early.total())
        if forgotten := aged + early:
            how = ", ".join(f"{number} {code}" for code, number in forgotten.most_common())
            logger.info(
                "forgot %d settled sessions, %d of them early since Redis fills up: %s",
                forgotten.total(),
                early.total(),
                how,
            )
