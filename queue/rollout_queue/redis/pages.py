"""Reads pages of the stream. Each read requires that the fence (`lease`) holds the token of this trainer.

    WATCH fence, GET fence ──▶ another token: LeaseLost
    MULTI, XREADGROUP, EXEC ─▶ a page; or nothing, if the fence was set in between: start again

In a script, Redis would build each page a second time as a Lua value, which takes more than twice as long.
But a full Redis refuses MULTI and still runs scripts, so the reader then uses a script.
"""

from datetime import UTC, datetime
from typing import Any

from redis import Redis
from redis.exceptions import OutOfMemoryError

from rollout_queue.contract.errors import LeaseLost, StorageUnavailable
from rollout_queue.redis import keys
from rollout_queue.redis.client.strangers import is_wrong_type
from rollout_queue.redis.lease.lease import LOST, UNFENCED

RawEntry = tuple[bytes, list[bytes] | None]
"""An entry's id, and its fields and values alternating; None if the entry was deleted."""


NO_GROUP = ("NOGROUP", "no such key")
"""What errors say if the stream, or its consumer group, is gone."""
GROUP_GONE = (
    f"the consumer group {keys.GROUP!r} of {keys.STREAM} was gone: the trainer has made it again, and reads "
    "on from where it was"
)


class Pages:
    """`redis` returns bytes (decode_responses off), `token` is of a claimed Lease."""

    def __init__(self, redis: Redis, token: str) -> None:
        self._redis, self._pool, self._token = redis, redis.connection_pool, token.encode()

    def page(self, count: int, what: bytes) -> list[RawEntry] | None:
        """Up to `count` entries: if `what` is b">", new ones; else the pending ones after the id `what`.

        None if Redis is full: then the caller reads by a script. Raises RedisError, and LeaseLost when
        another trainer has claimed the lease since.
        """
        connection: Any = self._pool.get_connection()
        try:
            return self._page(connection, count, what)
        except BaseException as error:
            connection.disconnect()  # drops its WATCH, and answers that were not read
            if isinstance(error, OutOfMemoryError):
                return None
            if is_wrong_type(error):
                self._redis.get(keys.FENCE)  # the client moves the value that is not Weir's
                self._redis.xlen(keys.STREAM)
            raise
        finally:
            self._pool.release(connection)

    def _page(self, connection: Any, count: int, what: bytes) -> list[RawEntry]:
        group = ("GROUP", keys.GROUP, keys.CONSUMER)
        read = ("XREADGROUP", *group, "COUNT", count, "STREAMS", keys.STREAM, what)
        found = None
        while found is None:
            _, fence = _asked(connection, ("WATCH", keys.FENCE), ("GET", keys.FENCE))
            if fence is None:
                raise StorageUnavailable(UNFENCED)
            if fence != self._token:
                raise LeaseLost(LOST)
            *_, found = _asked(connection, ("MULTI",), read, ("EXEC",))
        return _entries(found[0])


def _asked(connection: Any, *commands: tuple[str | bytes | int, ...]) -> list[Any]:
    """The answers to `commands`. A lost connection is not opened again, because a new one would watch no
    key."""
    connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    return [connection.read_response() for _ in commands]


def _entries(found: Any) -> list[RawEntry]:
    """The entries of the one stream that was read; RESP3 answers with a dictionary, RESP2 with a list."""
    if isinstance(found, Exception):
        raise found
    if not found:
        return []
    entries: list[RawEntry] = next(iter(found.values())) if isinstance(found, dict) else found[0][1]
    return entries


def place(entry_id: bytes) -> tuple[int, int]:
    """The two numbers of an entry's id, which tell its place in the stream."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)


def older_state(position: bytes) -> str:
    """What to say of a stream that had delivered entries up to `position`, and delivers earlier ones."""
    before = datetime.fromtimestamp(place(position)[0] / 1000, UTC)
    return (
        f"Redis came back with an older state: records and acknowledgements from before {before:%F %T} UTC "
        f"may be lost from {keys.STREAM} and elsewhere; what was trained is not trained again"
    )
