"""Reads pages of the stream. Each read requires that the fence (`lease`) holds the token of this trainer.

    WATCH fence, GET fence ──▶ another token: LeaseLost
    MULTI, XREADGROUP, EXEC ─▶ a page; or nothing, if the fence was set in between: start again

In a script, Redis would build each page a second time as a Lua value, which takes more than twice as long.
But a full Redis refuses MULTI and still runs scripts, so the reader then uses a script.

Records that the stream has lost are found in heads: those that only the heads of sessions without a verdict
have.

A record is appended to the stream and to its session's head at once, and stays in the stream until the
trainer acknowledges it, and so until its session has a verdict.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import OutOfMemoryError

from rollout_queue.contract.codec import decode
from rollout_queue.contract.errors import InvalidRecord, LeaseLost, StorageUnavailable, UnknownSchema
from rollout_queue.contract.head import field_of
from rollout_queue.contract.records import Record, Turn
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import LOST, UNFENCED
from rollout_queue.redis.losses import is_wrong_type

logger = logging.getLogger(__name__)


RawEntry = tuple[bytes, list[bytes] | None]
"""An entry's id, and its fields and values alternating; None if the entry was deleted."""


NO_GROUP = ("NOGROUP", "no such key")
"""What errors say if the stream, or its consumer group, is gone."""
GROUP_GONE = (
    f"the consumer group {key_names.GROUP!r} of {key_names.STREAM} was gone: the trainer has made it again, "
    "and reads on from where it was"
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
                self._redis.get(key_names.FENCE)  # the client moves the value that is not Weir's
                self._redis.xlen(key_names.STREAM)
            raise
        finally:
            self._pool.release(connection)

    def _page(self, connection: Any, count: int, what: bytes) -> list[RawEntry]:
        group = ("GROUP", key_names.GROUP, key_names.CONSUMER)
        read = ("XREADGROUP", *group, "COUNT", count, "STREAMS", key_names.STREAM, what)
        found = None
        while found is None:
            _, fence = _asked(connection, ("WATCH", key_names.FENCE), ("GET", key_names.FENCE))
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
        f"may be lost from {key_names.STREAM} and elsewhere; what was trained is not trained again"
    )


SESSIONS_AT_ONCE = 200
ENTRIES_AT_ONCE = 100
"""Entries have all tokens of their turns."""
RECORDS = ("t:", "r:", "outcome", "joined")
"""What the fields of a head that hold records begin with."""


NAMED = 5
"""How many sessions a note names."""


def append_missing(redis: Redis, append: Callable[[str, list[str]], int]) -> str | None:
    """Append the records that the stream lacks. Returns a sentence about them; None if it lacks none.

    `append` is given a session and fields of its head, and returns how many it has appended. Raises
    RedisError, and what `append` raises.
    """
    appended = {each.session_id: append(*each) for each in Refill(redis).missing()}
    sessions = [session_id for session_id, number in appended.items() if number]
    if not sessions:
        return None
    more = f" and {len(sessions) - NAMED} more" if sessions[NAMED:] else ""
    return (
        f"{key_names.STREAM} had lost {sum(appended.values())} records of sessions that wait for the "
        f"trainer, which has appended them again: {', '.join(sessions[:NAMED])}{more}"
    )


class MissingRecords(NamedTuple):
    """The records of a session that the stream lacks, as fields of its head, in the order to append them."""

    session_id: str
    fields: list[str]


class Refill:
    """Compares the stream with the heads. `redis` returns bytes (decode_responses off)."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._there: dict[str, set[str]] = {}
        """The records in the stream: fields of heads, by session."""
        self._read_up_to = b"-"

    def missing(self) -> Iterator[MissingRecords]:
        """Raises RedisError."""
        start = 0
        while page := self._sessions(start):
            heads = self._names_in_heads(page)
            self._read_stream()  # what is appended after that is in none of these heads
            for session_id, names in heads.items():
                lost = names - self._there.get(session_id, set())
                if lost and (fields := self._in_order(session_id, sorted(lost))):
                    yield MissingRecords(session_id, fields)
            start += len(page)

    def _sessions(self, start: int) -> list[str]:
        page: Any = self._redis.zrange(key_names.SESSIONS, start, start + SESSIONS_AT_ONCE - 1)
        return [name.decode() for name in page]

    def _names_in_heads(self, session_ids: list[str]) -> dict[str, set[str]]:
        """The records of the sessions without a verdict; not turns that have one of their own."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for session_id in session_ids:
                pipeline.hkeys(key_names.session(session_id))
            found = pipeline.execute()
        listed = {
            session_id: {name.decode() for name in names}
            for session_id, names in zip(session_ids, found, strict=True)
        }
        return {
            session_id: {each for each in names if each.startswith(RECORDS) and f"v{each[1:]}" not in names}
            for session_id, names in listed.items()
            if "verdict" not in names
        }

    def _read_stream(self) -> None:
        """Note the entries that have come since the last call."""
        while page := self._page():
            self._read_up_to = b"(" + page[-1][0]
            for _, fields in page:
                if (record := _readable(fields.get(key_names.STREAM_FIELD, b""))) is not None:
                    self._there.setdefault(record.session_id, set()).add(field_of(record))

    def _page(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        page: Any = self._redis.xrange(key_names.STREAM, self._read_up_to, "+", ENTRIES_AT_ONCE)
        return page  # type: ignore[no-any-return]

    def _in_order(self, session_id: str, fields: list[str]) -> list[str]:
        """The readable ones of these records, the turns first, and the outcome last."""
        values: Any = self._redis.hmget(key_names.session(session_id), fields)
        found: list[tuple[bool, float, str]] = []
        for field, value in zip(fields, values, strict=True):
            record = None if value is None else _readable(value)
            if record is not None:
                at = record.finished_at if isinstance(record, Turn) else record.created_at
                found.append((field == "outcome", at, field))
            elif value is not None:
                logger.warning("%s of session %s cannot be read, and stays lost", field, session_id)
        return [field for _, _, field in sorted(found)]


def _readable(packed: bytes) -> Record | None:
    try:
        return decode(packed)
    except (InvalidRecord, UnknownSchema):
        return None
