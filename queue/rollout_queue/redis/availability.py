"""The one place where a Redis failure becomes ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import RedisError

from rollout_queue.contract.errors import StorageUnavailable


@contextmanager
def available() -> Iterator[None]:
    """Raises StorageUnavailable when Redis cannot be reached, or refuses, inside the block."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise StorageUnavailable(f"Redis: {error}") from error


async def stored(call: Any) -> Any:
    """What Redis answers to an awaitable `call`; redis-py types the commands of its two clients as one."""
    try:
        return await call
    except (RedisError, OSError) as error:
        raise StorageUnavailable(f"Redis: {error}") from error
