"""Reads the list of all sessions page by page, whole or without their turns.

positions after a position ──▶ specs ──the caller wants──▶ whole heads, or summaries without turns and tokens
   of all sessions, or of one group, one user, or the step that made a version
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from rollout_queue.contract.codec import decode_spec
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.listing import ListPosition, ListScope, after_position
from rollout_queue.contract.records import SessionSpec
from rollout_queue.contract.tombstone import Tombstone, decode_tombstone
from rollout_queue.redis import keys
from rollout_queue.redis.availability import available, stored
from rollout_queue.redis.heads.reading import UNREADABLE, batches, pages_of, read_summary, readable_head
from rollout_queue.redis.scripts import sessions as session_scripts

logger = logging.getLogger(__name__)

FIELDS_AT_ONCE = 100
"""See `batches`."""
SUMMARY_FIELDS_AT_ONCE = 2000
"""Redis serves nobody else while a script runs, so no script looks at sessions with more fields than this."""
NAMES_AT_ONCE = 500
MOST_MEMBERS = 5000
"""If a group, a user or a step has more sessions, their list looks at all sessions."""


async def positions_after(
    redis: Redis, position: ListPosition, count: int, *, newest_first: bool = False
) -> list[ListPosition]:
    """The next positions after `position`, up to `count`, in the order of the list. Raises
    StorageUnavailable."""
    script = redis.register_script(session_scripts.LIST)
    found: list[bytes] = await stored(script([keys.SESSIONS], [*position, count, int(newest_first)]))
    return [ListPosition(float(at), name.decode()) for name, at in zip(found[::2], found[1::2], strict=True)]


async def positions_in(
    redis: Redis, position: ListPosition, count: int, scope: ListScope
) -> list[ListPosition]:
    """As `positions_after`; if the scope names a group, a user or a version, only of their sessions."""
    for key in _indexes(scope):
        if await stored(redis.scard(key)) <= MOST_MEMBERS:
            members = await stored(redis.smembers(key))  # bounded: MOST_MEMBERS
            return await _positions_of(redis, list(members), position, count, scope)
    if (version := scope.trained_version) is not None:
        trained: Any = await stored(
            redis.zrange(keys.TRAINED, version, version, byscore=True, offset=0, num=MOST_MEMBERS + 1)
        )
        if 0 < len(trained) <= MOST_MEMBERS:  # there is none of a step of an older release
            return await _positions_of(redis, trained, position, count, scope)
    return await positions_after(redis, position, count, newest_first=scope.newest_first)


async def _positions_of(
    redis: Redis, names: Sequence[Any], position: ListPosition, count: int, scope: ListScope
) -> list[ListPosition]:
    """The next positions after `position` among the sessions with these ids, in bytes."""
    # bounded: MOST_MEMBERS
    ages = await stored(redis.zmscore(keys.SESSIONS, list(names))) if names else []
    members = [
        ListPosition(float(at), name.decode()) for name, at in zip(names, ages, strict=True) if at is not None
    ]
    return after_position(members, position, newest_first=scope.newest_first)[:count]


def _indexes(scope: ListScope) -> list[str]:
    indexes: list[str] = [] if scope.group_id is None else [keys.group_members(scope.group_id)]
    return indexes if scope.user is None else [*indexes, keys.user_sessions(scope.user)]


async def wanted_heads(
    redis: Redis, names: Sequence[str], wanted: Callable[[SessionSpec], bool], *, turns: bool = True
) -> tuple[Mapping[str, SessionHead], list[str]]:
    """The readable sessions whose spec `wanted` accepts, by id; and the ids that have no session. Without
    `turns`, what is known of their turns is in `unread`.

    Raises StorageUnavailable.
    """
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hget(keys.session(name), "spec")
        specs = dict(zip(names, await stored(pipeline.execute()), strict=True))
    chosen = [name for name, spec in specs.items() if spec is not None and _chosen(name, spec, wanted)]
    heads = {} if turns else await _summaries(redis, chosen)
    heads |= await _whole(redis, [name for name in chosen if name not in heads])
    gone = [name for name, spec in specs.items() if spec is None]
    return heads, gone + [name for name in chosen if name not in heads]


async def _summaries(redis: Redis, names: Sequence[str]) -> dict[str, SessionHead]:
    """The heads without turns. A session is missing if its sums are not those of its turns, or if it cannot
    be read."""
    script = redis.register_script(session_scripts.SUMMARIES)
    heads: dict[str, SessionHead] = {}
    for page in batches(await _sizes(redis, names), SUMMARY_FIELDS_AT_ONCE):
        found: list[list[Any]] = await stored(script([keys.session(name) for name in page]))
        for name, (turns, *fields) in zip(page, found, strict=True):
            try:
                head = read_summary(dict(zip(fields[::2], fields[1::2], strict=True)), turns)
            except UNREADABLE:  # the whole head tells why, or can be read
                continue
            if head is not None:
                heads[name] = head
    return heads


async def _whole(redis: Redis, names: Sequence[str]) -> dict[str, SessionHead]:
    heads: dict[str, SessionHead] = {}
    for batch in batches(await _sizes(redis, names), FIELDS_AT_ONCE):
        async with redis.pipeline(transaction=False) as pipeline:
            for name in batch:
                pipeline.hgetall(keys.session(name))
            for name, fields in zip(batch, await stored(pipeline.execute()), strict=True):
                if (head := readable_head(name, fields)) is not None:
                    heads[name] = head
    return heads


async def _sizes(redis: Redis, names: Sequence[str]) -> list[tuple[str, int]]:
    """How many fields each session has."""
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hlen(keys.session(name))
        return list(zip(names, await stored(pipeline.execute()), strict=True))


async def tombstones_of(redis: Redis, session_ids: Collection[str]) -> Mapping[str, Tombstone]:
    """The tombstones of those that were deleted, by id. Raises StorageUnavailable."""
    tombstones: dict[str, Tombstone] = {}
    for page in pages_of(session_ids, NAMES_AT_ONCE):
        found: list[bytes | None] = await stored(redis.hmget(keys.DELETED, page))  # bounded: by the page
        raw = zip(page, found, strict=True)
        tombstones |= {name: decode_tombstone(value) for name, value in raw if value is not None}
    return tombstones


async def members_of(redis: Redis, group_id: str) -> list[str]:
    """The ids of a group's sessions, sorted. Raises StorageUnavailable."""
    with available():
        return sorted(
            {
                name.decode()
                async for name in redis.sscan_iter(keys.group_members(group_id), count=NAMES_AT_ONCE)
            }
        )


def _chosen(name: str, spec: bytes, wanted: Callable[[SessionSpec], bool]) -> bool:
    try:
        return wanted(decode_spec(spec))
    except UNREADABLE as error:
        logger.error("session %s cannot be read and is left out of a list: %s", name, error)
        return False
