"""Translates failures of Redis into StorageUnavailable."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import AuthenticationError, AuthorizationError, BusyLoadingError, RedisError

from rollout_queue.contract.errors import StorageUnavailable

UNASKED = ("HELLO must be called", "Authentication required", "NOAUTH")
"""What Redis says to a client that gives no password and needs one."""


def refusal(error: Exception) -> str | None:
    """Why a Redis that answers refuses this client; None if it does not, or does not answer."""
    if isinstance(error, BusyLoadingError):
        return "Redis is still reading its file, and refuses calls until it has"
    if not isinstance(error, AuthenticationError | AuthorizationError):
        return None
    if any(each in str(error) for each in UNASKED):
        return (
            "Redis asks for a password, and none was given: put it into WEIR_REDIS_URL, or into the file "
            "that WEIR_REDIS_PASSWORD_FILE names"
        )
    return (
        "Redis refuses the user or the password: correct WEIR_REDIS_URL, or the file that "
        "WEIR_REDIS_PASSWORD_FILE names"
    )


def unavailable(error: Exception) -> StorageUnavailable:
    """The error that means this failure of Redis."""
    return StorageUnavailable(refusal(error) or f"Redis: {error}")


@contextmanager
def available() -> Iterator[None]:
    """Raises StorageUnavailable when Redis cannot be reached or refuses a command inside the block."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise unavailable(error) from error


async def stored(call: Any) -> Any:
    """What Redis answers to `call`. Raises StorageUnavailable.

    `call` is an awaitable; redis-py types the commands of its synchronous and asynchronous client alike.
    """
    try:
        return await call
    except (RedisError, OSError) as error:
        raise unavailable(error) from error
