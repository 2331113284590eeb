"""Recognizes replies by which a server says that it is not the master of this deployment's keys."""

from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

NOT_THE_MASTER = (ReadOnlyError, AskError, ClusterDownError, TryAgainError)
"""MovedError is an AskError, and MasterDownError a ClusterDownError."""


def not_the_master(reply: Any) -> bool:
    """Whether the command was not carried out, because its server is not the master of the keys."""
    if not isinstance(reply, ResponseError):
        return False
    # Before Redis 7, a script that fails has the code of its own error only in the text.
    return isinstance(reply, NOT_THE_MASTER) or "-READONLY " in str(reply)
