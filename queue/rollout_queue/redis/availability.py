"""Translates failures of Redis into StorageUnavailable; recognizes replies by which a server says that it is
not the master of this deployment's keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

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


NOT_THE_MASTER = (ReadOnlyError, AskError, ClusterDownError, TryAgainError)
"""MovedError is an AskError, and MasterDownError a ClusterDownError."""


def not_the_master(reply: Any) -> bool:
    """Whether the command was not carried out, because its server is not the master of the keys."""
    if not isinstance(reply, ResponseError):
        return False
    # Before Redis 7, a script that fails has the code of its own error only in the text.
    return isinstance(reply, NOT_THE_MASTER) or "-READONLY " in str(reply)
