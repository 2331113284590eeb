"""Reads all recorded sessions in order, a few at a time, for an export.

Sessions are ordered as in `weir:sessions`: by creation time, then by id. A deleted session keeps its
position. So a position still says how far a reader has come after sessions were added, deleted or forgotten.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from rollout_queue.contract.head import LIST_START, ListPosition, SessionHead, Tombstone, decode_tombstone
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.session_heads import UNREADABLE, batches, read_head
from rollout_queue.redis.session_lists import positions_after

logger = logging.getLogger(__name__)

PAGE = 100
"""Sessions whose sizes are read at once."""
FIELDS_AT_ONCE = 100
"""See `batches`."""


class ArchivedSession(NamedTuple):
    """One session, or its tombstone."""

    session_id: str
    head: SessionHead | None
    tombstone: Tombstone | None


async def position_of(redis: Redis, session_id: str) -> ListPosition | None:
    """The position of a session; None for one that never existed or was forgotten."""
    created_at = await stored(redis.zscore(key_names.SESSIONS, session_id))
    return None if created_at is None else ListPosition(float(created_at), session_id)


async def sessions_from(
    redis: Redis, start: ListPosition | None, until: float | None
) -> AsyncIterator[list[ArchivedSession]]:
    """The sessions from `start` on, itself included, that were created before `until`; in batches.

    Raises StorageUnavailable.
    """
    first = [] if start is None else [start]
    while places := first + await positions_after(redis, start or LIST_START, PAGE):
        names = [name for at, name in places if until is None or at < until]
        for batch in batches(await _sizes(redis, names), FIELDS_AT_ONCE):
            yield await _read(redis, batch)
        if len(names) < len(places):
            return
        first, start = [], places[-1]


async def _sizes(redis: Redis, names: Sequence[str]) -> list[tuple[str, int]]:
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hlen(key_names.session(name))
        return list(zip(names, await stored(pipeline.execute()), strict=True))


async def _read(redis: Redis, names: Sequence[str]) -> list[ArchivedSession]:
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hgetall(key_names.session(name))
        # Read tombstones last: a session that is deleted meanwhile is found as a session or as a tombstone.
        pipeline.hmget(key_names.DELETED, list(names))  # bounded: by the page
        *hashes, tombstones = await stored(pipeline.execute())
    found = []
    for name, tombstone, fields in zip(names, tombstones, hashes, strict=True):
        if tombstone is not None:
            found.append(ArchivedSession(name, None, decode_tombstone(tombstone)))
            continue
        try:
            found.append(ArchivedSession(name, read_head(fields), None))
        except UNREADABLE as error:
            logger.error("session %s is left out of an export: %s", name, error)
    return found
