"""Closes sessions whose deadline has passed. Puts off sessions that this build cannot read, and logs them."""

import logging

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.codec import decode_spec, encode
from rollout_queue.contract.verdicts import expiry
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.heads.reading import UNREADABLE
from rollout_queue.redis.scripts import sessions as session_scripts
from rollout_queue.redis.sessions.ending import terms_of

logger = logging.getLogger(__name__)

PUT_OFF_S = 60.0
"""A session that cannot be read is tried again after this time, because a newer build may run by then."""


class Expiry:
    """Closes overdue sessions on Redis. Several gateways may do so at the same time."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._expire = redis.register_script(session_scripts.EXPIRE)
        self._put_off = redis.register_script(session_scripts.PUT_OFF)

    async def expire(self, now: float, limit: int) -> int:
        """Close or put off up to `limit` sessions. Returns how many. Raises StorageUnavailable."""
        overdue: list[bytes] = await stored(
            self._redis.zrangebyscore(keys.DEADLINES, 0, now, start=0, num=limit)
        )
        closed, unreadable, last_error = 0, list[str](), ""
        for session_id in (name.decode() for name in overdue):
            try:
                closed += await self._expire_one(session_id, now)
            except UNREADABLE as error:
                unreadable.append(session_id)
                last_error = str(error)
                await stored(self._put_off([keys.DEADLINES], [session_id, now + PUT_OFF_S]))
        if unreadable:
            logger.error(
                "%d sessions cannot be read and do not expire, among them %s: %s",
                len(unreadable),
                unreadable[-1],
                last_error,
            )
        return closed + len(unreadable)

    async def _expire_one(self, session_id: str, now: float) -> int:
        raw = await stored(self._redis.hget(keys.session(session_id), "spec"))
        if raw is None:
            await stored(self._redis.zrem(keys.DEADLINES, session_id))
            return 0
        outcome, verdict = expiry(decode_spec(raw), now)
        return int(
            await stored(
                self._expire(
                    [keys.session(session_id), keys.STREAM, keys.DEADLINES, keys.VERDICTS, keys.SETTLED],
                    [session_id, encode(outcome), msgspec.json.encode(verdict), now, terms_of(outcome)],
                )
            )
        )
