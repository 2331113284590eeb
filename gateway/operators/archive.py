"""Everything that was recorded, in order, a few sessions at a time: what an export reads.

The order is that of `weir:sessions`, by creation time and id; a session stays at its place also when it is
deleted. So a session's id says how far a reader has come, whatever was added or deleted since.
"""

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from rollout_queue import keys
from rollout_queue.availability import stored
from rollout_queue.errors import InvalidRecord, UnknownSchema
from rollout_queue.head import SessionHead
from rollout_queue.redis_writer import read_head
from rollout_queue.tombstone import Tombstone, decode_tombstone

logger = logging.getLogger(__name__)

PAGE = 100
"""Sessions whose sizes are asked for at once."""
FIELDS_AT_ONCE = 100
"""Fields, most of them turns, that are read at once; a larger session comes alone."""


class Found(NamedTuple):
    """One session, or its tombstone."""

    session_id: str
    head: SessionHead | None
    tombstone: Tombstone | None


async def known(redis: Redis, session_id: str) -> bool:
    """Whether an archive has, or had, this session."""
    return await stored(redis.zscore(keys.SESSIONS, session_id)) is not None


async def sessions_from(redis: Redis, start: str | None, until: float | None) -> AsyncIterator[list[Found]]:
    """Sessions created before `until`, from `start` on, itself included. Raises StorageUnavailable."""
    last = None
    while True:
        named = await _page(redis, start if last is None else last)
        if last is not None:
            named = named[1:]
        if not named:
            return
        for names in _batches(
            await _sizes(redis, [name for name, at in named if until is None or at < until])
        ):
            yield await _read(redis, names)
        last, created_at = named[-1]
        if until is not None and created_at >= until:
            return


async def _page(redis: Redis, start: str | None) -> list[tuple[str, float]]:
    """Session ids with their creation times, `start` first."""
    while True:
        rank = 0 if start is None else await stored(redis.zrank(keys.SESSIONS, start))
        if rank is None:
            return []
        page = await stored(redis.zrange(keys.SESSIONS, rank, rank + PAGE, withscores=True))
        named = [(name.decode(), float(score)) for name, score in page]
        # Between the two questions, a session of an earlier time may have come in before it.
        if start is None or (named and named[0][0] == start):
            return named


async def _sizes(redis: Redis, names: Sequence[str]) -> list[tuple[str, int]]:
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hlen(keys.session(name))
        return list(zip(names, await stored(pipeline.execute()), strict=True))


def _batches(sizes: Sequence[tuple[str, int]]) -> Iterator[list[str]]:
    batch: list[str] = []
    fields = 0
    for name, size in sizes:
        if batch and fields + size > FIELDS_AT_ONCE:
            yield batch
            batch, fields = [], 0
        batch.append(name)
        fields += size
    if batch:
        yield batch


async def _read(redis: Redis, names: Sequence[str]) -> list[Found]:
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hgetall(keys.session(name))
        # After them, so that a session that is deleted meanwhile is found as one or the other.
        pipeline.hmget(keys.DELETED, list(names))
        *hashes, tombstones = await stored(pipeline.execute())
    found = []
    for name, tombstone, fields in zip(names, tombstones, hashes, strict=True):
        if tombstone is not None:
            found.append(Found(name, None, decode_tombstone(tombstone)))
            continue
        try:
            found.append(Found(name, read_head(fields), None))
        except (InvalidRecord, UnknownSchema) as error:
            logger.error("session %s is left out of an export: %s", name, error)
    return found
