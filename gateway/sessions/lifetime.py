"""How long sessions live: a call in flight keeps one open; settled ones are removed after `retention_s`.

A call is a sign of life, however long its answer takes. The script EXPIRE (`redis/session_scripts.py`) ends
the sessions that nothing keeps open. A settled session (with a verdict) is removed earlier if Redis fills up:

Redis' memory:   0 ─────────── LOW ─ HIGH ────── queue_memory ────────────── maxmemory
                 by age alone     ◀── early      no new sessions are opened  nothing is stored

To forget a session is to remove its records. The counters of verdicts still count it.
"""

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from redis.asyncio import Redis

from gateway.prometheus import Metrics
from gateway.settings import GatewaySettings
from rollout_queue import clock
from rollout_queue.contract.errors import SessionClosed
from rollout_queue.contract.head import SessionHead
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.session_retention import Forgotten, RedisForgetter
from rollout_queue.redis.stream_writer import StreamWriter

MARGIN_S = 5.0
"""A session with calls in flight is extended this long before it expires. Some polls may be late."""


@dataclass
class SessionInFlight:
    """A session with calls in flight."""

    session_id: str
    ttl_s: float
    expires_at: float
    """Seconds since the epoch; as far as this gateway knows, the session expires then."""
    calls: int = 0

    @property
    def due(self) -> bool:
        """Whether the expiry has to be put off now."""
        return self.expires_at < clock.now() + max(MARGIN_S, self.ttl_s / 4)


class CallsInFlight:
    """The sessions of this gateway that have calls in flight."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._sessions: dict[str, SessionInFlight] = {}

    async def enter(self, head: SessionHead) -> SessionInFlight:
        """A call of the session begins: the session is kept open until `leave`. Raises StorageUnavailable."""
        spec = head.spec
        session = self._sessions.get(spec.session_id)
        if session is None:
            session = self._sessions[spec.session_id] = SessionInFlight(
                spec.session_id, spec.ttl_s, head.expires_at
            )
        session.calls += 1
        if head.stored and session.expires_at < clock.now() + MARGIN_S:
            try:
                await self._put_off(session)
            except BaseException:
                self.leave(session)
                raise
        return session

    def leave(self, session: SessionInFlight) -> None:
        """A call of the session ended."""
        session.calls -= 1
        # The turn of this call has set a new expiry. Other calls in flight may outlast it.
        session.expires_at = min(session.expires_at, clock.now() + session.ttl_s)
        if not session.calls:
            self._sessions.pop(session.session_id, None)

    async def put_off_expiry(self) -> None:
        """Put off the expiry of every session whose expiry is near. Raises StorageUnavailable."""
        for session in list(self._sessions.values()):
            if session.due:
                await self._put_off(session)

    async def _put_off(self, session: SessionInFlight) -> None:
        # The session may have got another time to live since the call began, so Redis says when it expires.
        with suppress(SessionClosed):  # it was finished meanwhile, or its first turn will open it
            session.expires_at = await self._writer.heartbeat(session.session_id, clock.now(), 2 * MARGIN_S)


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
                key_names.STREAM,
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
