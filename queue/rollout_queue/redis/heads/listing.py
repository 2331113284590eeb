"""Reads the list of all sessions page by page."""

from redis.asyncio import Redis

from rollout_queue.contract.listing import ListPosition
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.scripts import sessions as session_scripts


async def positions_after(redis: Redis, position: ListPosition, count: int) -> list[ListPosition]:
    """The next positions after `position`, up to `count`, oldest first. Raises StorageUnavailable."""
    script = redis.register_script(session_scripts.LIST_AFTER)
    found: list[bytes] = await stored(script([keys.SESSIONS], [*position, count]))
    return [ListPosition(float(at), name.decode()) for name, at in zip(found[::2], found[1::2], strict=True)]
