"""Finds the records that the stream has lost: those that only the heads of sessions without a verdict have.

A record is appended to the stream and to its session's head at once, and stays in the stream until the
trainer acknowledges it, and so until its session has a verdict.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from redis import Redis

from rollout_queue.contract.codec import decode
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.head import field_of
from rollout_queue.contract.records import Record, Turn
from rollout_queue.redis import keys

logger = logging.getLogger(__name__)

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
        f"{keys.STREAM} had lost {sum(appended.values())} records of sessions that wait for the trainer, "
        f"which has appended them again: {', '.join(sessions[:NAMED])}{more}"
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
        page: Any = self._redis.zrange(keys.SESSIONS, start, start + SESSIONS_AT_ONCE - 1)
        return [name.decode() for name in page]

    def _names_in_heads(self, session_ids: list[str]) -> dict[str, set[str]]:
        """The records of the sessions without a verdict; not turns that have one of their own."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for session_id in session_ids:
                pipeline.hkeys(keys.session(session_id))
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
                if (record := _readable(fields.get(keys.STREAM_FIELD, b""))) is not None:
                    self._there.setdefault(record.session_id, set()).add(field_of(record))

    def _page(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        page: Any = self._redis.xrange(keys.STREAM, self._read_up_to, "+", ENTRIES_AT_ONCE)
        return page  # type: ignore[no-any-return]

    def _in_order(self, session_id: str, fields: list[str]) -> list[str]:
        """The readable ones of these records, the turns first, and the outcome last."""
        values: Any = self._redis.hmget(keys.session(session_id), fields)
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
