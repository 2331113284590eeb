"""Reads the list of all sessions page by page. Only the sessions that the caller wants are read whole."""

import logging
from collections.abc import Callable, Mapping, Sequence

from redis.asyncio import Redis

from rollout_queue.contract.codec import decode_spec
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.listing import ListPosition
from rollout_queue.contract.records import SessionSpec
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.heads.reading import UNREADABLE, batches, readable_head
from rollout_queue.redis.scripts import sessions as session_scripts

logger = logging.getLogger(__name__)

FIELDS_AT_ONCE = 100
"""See `batches`."""


async def positions_after(redis: Redis, position: ListPosition, count: int) -> list[ListPosition]:
    """The next positions after `position`, up to `count`, oldest first. Raises StorageUnavailable."""
    script = redis.register_script(session_scripts.LIST_AFTER)
    found: list[bytes] = await stored(script([keys.SESSIONS], [*position, count]))
    return [ListPosition(float(at), name.decode()) for name, at in zip(found[::2], found[1::2], strict=True)]


async def wanted_heads(
    redis: Redis, names: Sequence[str], wanted: Callable[[SessionSpec], bool]
) -> tuple[Mapping[str, SessionHead], list[str]]:
    """The readable sessions whose spec `wanted` accepts, by id; and the ids that have no session.

    Raises StorageUnavailable.
    """
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hget(keys.session(name), "spec")
            pipeline.hlen(keys.session(name))
        replies = await stored(pipeline.execute())
    specs = dict(zip(names, replies[::2], strict=True))
    sizes = dict(zip(names, replies[1::2], strict=True))
    chosen = [name for name, spec in specs.items() if spec is not None and _chosen(name, spec, wanted)]
    heads: dict[str, SessionHead] = {}
    for batch in batches([(name, sizes[name]) for name in chosen], FIELDS_AT_ONCE):
        async with redis.pipeline(transaction=False) as pipeline:
            for name in batch:
                pipeline.hgetall(keys.session(name))
            for name, fields in zip(batch, await stored(pipeline.execute()), strict=True):
                if (head := readable_head(name, fields)) is not None:
                    heads[name] = head
    gone = [name for name, spec in specs.items() if spec is None]
    return heads, gone + [name for name in chosen if name not in heads]


def _chosen(name: str, spec: bytes, wanted: Callable[[SessionSpec], bool]) -> bool:
    try:
        return wanted(decode_spec(spec))
    except UNREADABLE as error:
        logger.error("session %s cannot be read and is left out of a list: %s", name, error)
        return False
