"""Writes the keys of a backup into Redis, and changes what belongs to the former place.

Left out: who is registered and who has which lease, since the former servers and trainer may still run.
Changed: where versions lie, and when sessions expire, which gets later by the time that has passed since the
backup.
"""

from collections.abc import Iterator
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from rollout_queue.redis import keys
from weir.backup.manifest import BackupBroken
from weir.backup.records import StoredKey, StoredValues, stored_keys
from weir.backup.redis_copy import PREFIX
from weir.errors import StackError

LEFT_OUT = frozenset(
    {
        *(keys.SERVERS, keys.SERVER_PUSHES, keys.TRAINER, keys.LEASE, keys.FENCE, keys.PUSH_LEASE),
        *(keys.SCHEMA, keys.LASTING, keys.LOSSES),
    }
)
LATER = (keys.DEADLINES, keys.CLIENT_SESSIONS_LIVE)
"""Sorted sets whose scores are times at which something ends."""
LOCATED = (keys.POLICIES, keys.ADAPTERS, keys.RESERVED)
"""Hashes whose values have the places of versions."""
PAGE = 1000
MOST_BYTES_AT_ONCE = 8 * 2**20
BULK_LIMIT = 512 * 2**20
"""What Redis takes in one argument, unless its settings say otherwise."""


def has_keys(redis: Redis, own: bytes) -> bool:
    """Whether there are names that begin with `own`."""
    return next(redis.scan_iter(match=own + b"*", count=PAGE), None) is not None


def clear(redis: Redis, own: bytes) -> None:
    """Remove all keys whose names begin with `own`."""
    for page in _pages(redis.scan_iter(match=own + b"*", count=PAGE)):
        redis.unlink(*page)  # bounded: PAGE


def write_keys(redis: Redis, own: bytes, directory: Any, values: StoredValues) -> int:
    """Write all keys of the backup, with names that begin with `own`. Returns how many. Raises StackError."""
    count = 0
    pending: Any = redis.pipeline(transaction=False)
    size = 0
    for key in stored_keys(directory):
        if key.name.decode(errors="replace") in LEFT_OUT:
            continue
        if key.size > BULK_LIMIT:
            _raise_limit(redis, key)
        expires = ("ABSTTL",) if key.expires_ms is not None else ()
        pending.execute_command(  # bounded: by the key that is restored
            "RESTORE",
            own + key.name.removeprefix(PREFIX),
            key.expires_ms or 0,
            values.value(key),
            "REPLACE",
            *expires,
        )
        count, size = count + 1, size + key.size
        if size > MOST_BYTES_AT_ONCE or len(pending) >= PAGE:
            _send(pending)
            size = 0
    _send(pending)
    return count


def _send(pending: Any) -> None:
    try:
        pending.execute()
    except ResponseError as error:
        if "DUMP payload" in str(error) or "Bad data format" in str(error):
            raise StackError(
                f"this Redis does not take the data: {error}; it must not be older than the one of the backup"
            ) from error
        raise StackError(f"Redis refuses the data: {error}") from error
    except RedisError as error:
        raise StackError(f"Redis failed: {error}") from error


def _raise_limit(redis: Redis, key: StoredKey) -> None:
    """Let Redis take an argument of this size."""
    try:
        redis.config_set("proto-max-bulk-len", str(key.size + 2**20))
        redis.config_set("client-query-buffer-limit", str(max(2**30, 2 * key.size)))
    except ResponseError as error:
        raise StackError(
            f"{key.name.decode(errors='replace')} has {key.size} bytes, and Redis takes {BULK_LIMIT}: raise "
            "its "
            f"proto-max-bulk-len and client-query-buffer-limit ({error})"
        ) from error


def move_locations(redis: Redis, before: str, after: str) -> int:
    """Change the places of versions in `before` to the same names in `after`; both are URLs that end with a
    slash. Returns how many were changed."""
    changed = 0
    for name in LOCATED:
        for field, value in redis.hscan_iter(name, count=PAGE):
            moved = value.replace(before.encode(), after.encode())
            if moved != value:
                redis.hset(name, field, moved)
                changed += 1
    return changed


def postpone(redis: Redis, seconds: float) -> None:
    """Let sessions expire later by what has passed since the backup."""
    for name in LATER:
        for page in _pages(redis.zscan_iter(name, count=PAGE)):
            with redis.pipeline(transaction=False) as pipeline:
                for member, _ in page:
                    pipeline.zincrby(name, seconds, member)
                pipeline.execute()


def _pages(items: Iterator[Any]) -> Iterator[list[Any]]:
    page: list[Any] = []
    for item in items:
        page.append(item)
        if len(page) == PAGE:
            yield page
            page = []
    if page:
        yield page


def check_index(directory: Any, expected: int) -> None:
    """Raises BackupBroken if the index has another number of keys than the manifest says."""
    found = sum(1 for _ in stored_keys(directory))
    if found != expected:
        raise BackupBroken(f"{directory} has {found} keys of Redis, and its manifest says {expected}")
