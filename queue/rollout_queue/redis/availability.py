"""Translates failures of Redis into StorageUnavailable."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import RedisError

from rollout_queue.contract.errors import StorageUnavailable


@contextmanager
def available() -> Iterator[None]:
    """Raises StorageUnavailable when Redis cannot be reached or refuses a command inside the block."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise StorageUnavailable(f"Redis: {error}") from error


async def stored(call: Any) -> Any:
    """What Redis answers to `call`. Raises StorageUnavailable.

    `call` is an awaitable; redis-py types the commands of its synchronous and asynchronous client alike.
    """
    try:
        return await call
    except (RedisError, OSError) as error:
        raise StorageUnavailable(f"Redis: {error}") from error
