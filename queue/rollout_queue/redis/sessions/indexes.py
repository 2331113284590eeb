"""Makes the lists of sessions whole again that Redis has lost, from each other and from the heads.

weir:sessions  ◀── the sessions of weir:settled and weir:deadlines
weir:deadlines ◀── the sessions of weir:sessions that may expire: not those with a verdict, or with an
                   outcome and a reward, which expiry has taken from the list

`retention` adds missing sessions to `weir:settled`. A list that is lost is there again with the next session,
so its length does not tell.
"""

import logging
from collections.abc import AsyncIterator

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from rollout_queue import clock
from rollout_queue.contract.codec import decode_spec
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.records import SessionSpec
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.client.losses import note_loss_async
from rollout_queue.redis.scripts import sessions as session_scripts

logger = logging.getLogger(__name__)

PAGE = 500
SCAN_EVERY_S = 600.0
"""How often all sessions are looked at for those without a deadline."""
LOOK = """
-- KEYS: sessions, deadlines, settled
-- Returns whether the first session of another list is not in that of all sessions, and how many sessions
-- have neither a deadline nor a time of their verdict.
local function lacks(list)
    local first = redis.call('ZRANGE', list, 0, 0)[1]
    return first and not redis.call('ZSCORE', KEYS[1], first)
end
local function count(list) return redis.call('ZCARD', list) end
return {(lacks(KEYS[2]) or lacks(KEYS[3])) and 1 or 0, count(KEYS[1]) - count(KEYS[2]) - count(KEYS[3])}
"""


class SessionIndexes:
    """Looks at every poll whether a list was lost. `redis` returns bytes (decode_responses off)."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._look = redis.register_script(LOOK)
        self._list = redis.register_script(session_scripts.LIST_AGAIN)
        self._time = redis.register_script(session_scripts.TIME_AGAIN)
        self._known = 0
        """How many sessions rightly had no deadline at the last scan: only the trainer has to act."""
        self._scanned_at = float("-inf")

    async def mend(self) -> None:
        """Raises StorageUnavailable."""
        lacking, loose = await stored(self._look([keys.SESSIONS, keys.DEADLINES, keys.SETTLED]))
        if lacking:
            listed = [name async for name in self._list_again()]
            said = f"{keys.SESSIONS} had lost sessions: the gateways have listed {len(listed)} of them again"
            await note_loss_async(self._redis, keys.SESSIONS, said)
        elif loose > self._known and clock.monotonic() - self._scanned_at > SCAN_EVERY_S:
            self._scanned_at = clock.monotonic()
            timed = [name async for name in self._time_again()]
            self._known = loose - len(timed)
            if timed:
                said = f"{keys.DEADLINES} had lost sessions: {len(timed)} of them expire again"
                await note_loss_async(self._redis, keys.DEADLINES, said)
        elif loose < self._known:
            self._known = loose

    async def _list_again(self) -> AsyncIterator[str]:
        """List the sessions of the other lists. Yields those that were not listed."""
        for source in (keys.SETTLED, keys.DEADLINES):
            async for specs in self._specs(source):
                scores = {name: spec.created_at for name, spec in specs.items()}
                for name in await self._added(self._list, keys.SESSIONS, scores):
                    yield name

    async def _time_again(self) -> AsyncIterator[str]:
        """Give a whole time to live to sessions that have none and may expire. Yields them."""
        async for specs in self._specs(keys.SESSIONS):
            now = clock.now()
            scores = {name: now + spec.ttl_s for name, spec in specs.items()}
            for name in await self._added(self._time, keys.DEADLINES, scores):
                yield name

    async def _added(self, script: AsyncScript, key: keys.Key, scores: dict[str, float]) -> list[str]:
        """Add sessions to a list with a script, which looks at each again: it may have ended, or be deleted,
        since its head was read. Returns those that were missing."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name, score in scores.items():
                await script([keys.session(name), key], [name, score], client=pipeline)
            added = await stored(pipeline.execute())
        return [name for name, was_missing in zip(scores, added, strict=True) if was_missing]

    async def _specs(self, source: keys.Key) -> AsyncIterator[dict[str, SessionSpec]]:
        """What was said of the sessions of a list, page by page, without those that cannot be read."""
        async for names in self._pages(source):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.hget(keys.session(name), "spec")
                found = await stored(pipeline.execute())
            specs: dict[str, SessionSpec] = {}
            for name, spec in zip(names, found, strict=True):
                try:
                    if spec is not None:
                        specs[name] = decode_spec(spec)
                except (InvalidRecord, UnknownSchema) as error:
                    logger.warning("session %s cannot be read, and stays unlisted: %s", name, error)
            yield specs

    async def _pages(self, source: keys.Key) -> AsyncIterator[list[str]]:
        start = 0
        while page := await stored(self._redis.zrange(source, start, start + PAGE - 1)):
            yield [name.decode() for name in page]
            start += len(page)
