"""Replaces the prefix of keys when a command is packed, for deployments whose prefix is not `weir`."""

from collections.abc import Callable, Sequence
from typing import Any

from redis.crc import key_slot

from rollout_queue.redis.keys import PREFIX, Key

Rename = Callable[[Sequence[Any]], Sequence[Any]]


def wire_prefix(prefix: str, *, cluster: bool) -> str:
    """In a cluster the prefix is a hash tag, so that all keys of a deployment are in one slot."""
    return f"{{{prefix}}}" if cluster else prefix


def slot_of(prefix: str) -> int:
    return int(key_slot(prefix.encode()))


def renaming(prefix: str) -> Rename | None:
    """What replaces the keys among a command's arguments; None if they stay as they are."""
    if prefix == PREFIX:
        return None
    length = len(PREFIX)

    def rename(arguments: Sequence[Any]) -> Sequence[Any]:
        return tuple([prefix + each[length:] if isinstance(each, Key) else each for each in arguments])

    return rename
