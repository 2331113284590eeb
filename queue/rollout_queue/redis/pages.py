"""Pages of the stream, each read only while the fence is its trainer's.

    WATCH fence, GET fence ──▶ another's token: LeaseLost
    MULTI, XREADGROUP, EXEC ─▶ a page; or nothing, since somebody has set the fence in between: look again

A script would have Redis make each page twice, once for Lua, at more than twice the time. But a full Redis
queues nothing, and runs scripts.
"""

from typing import Any

from redis import Redis
from redis.exceptions import OutOfMemoryError

from rollout_queue.contract.errors import LeaseLost
from rollout_queue.redis import keys
from rollout_queue.redis.lease import LOST

RawEntry = tuple[bytes, list[bytes] | None]
"""An entry's id, and its fields and values in turn; None where the entry was deleted."""


class Pages:
    """`redis` returns bytes (decode_responses off), `token` is of a claimed Lease."""

    def __init__(self, redis: Redis, token: str) -> None:
        self._pool, self._token = redis.connection_pool, token.encode()

    def page(self, count: int, what: bytes) -> list[RawEntry] | None:
        """Up to `count` entries: new ones for `what` b">", else what is owed beyond that id. None where Redis
        is full, and a script is to read.

        Raises LeaseLost when another trainer has claimed the lease since; RedisError.
        """
        connection: Any = self._pool.get_connection()
        try:
            return self._page(connection, count, what)
        except BaseException as error:
            connection.disconnect()  # and with it goes what it watches, and what it has still to say
            if isinstance(error, OutOfMemoryError):
                return None
            raise
        finally:
            self._pool.release(connection)

    def _page(self, connection: Any, count: int, what: bytes) -> list[RawEntry]:
        group = ("GROUP", keys.GROUP, keys.CONSUMER)
        read = ("XREADGROUP", *group, "COUNT", count, "STREAMS", keys.STREAM, what)
        found = None
        while found is None:
            _, fence = _asked(connection, ("WATCH", keys.FENCE), ("GET", keys.FENCE))
            if not self._ours(fence):
                raise LeaseLost(LOST)
            *_, found = _asked(connection, ("MULTI",), read, ("EXEC",))
        return _entries(found[0])

    def _ours(self, fence: bytes | None) -> bool:
        return fence == self._token


def _asked(connection: Any, *commands: tuple[str | bytes | int, ...]) -> list[Any]:
    """The answers, of this connection and no other: one that is new watches nothing."""
    connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    return [connection.read_response() for _ in commands]


def _entries(found: Any) -> list[RawEntry]:
    """Of the one stream that was asked for; a dictionary is what newer protocols answer."""
    if isinstance(found, Exception):
        raise found
    if not found:
        return []
    entries: list[RawEntry] = found[keys.STREAM.encode()] if isinstance(found, dict) else found[0][1]
    return entries
