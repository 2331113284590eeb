"""The trainer's end of the stream, on Redis: a consumer group with one fixed consumer."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from redis import Redis
from redis.exceptions import ResponseError

from rollout_queue import keys
from rollout_queue.availability import available
from rollout_queue.codec import decode
from rollout_queue.errors import InvalidRecord, UnknownSchema
from rollout_queue.stream import Entry, Verdicts

logger = logging.getLogger(__name__)

RawEntry = tuple[bytes | None, dict[bytes, bytes] | None]


class RedisReader:
    """StreamReader on Redis. `redis` returns bytes (decode_responses off)."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        with available(), _existing_group():
            redis.xgroup_create(keys.STREAM, keys.GROUP, id="0", mkstream=True)

    def reclaim(self) -> Iterator[Entry]:
        cursor: Any = "0-0"
        while True:
            with available():
                reply: Any = self._redis.xautoclaim(
                    keys.STREAM, keys.GROUP, keys.CONSUMER, min_idle_time=0, start_id=cursor, count=1000
                )
            cursor, raw = reply[0], reply[1]
            yield from self._decoded(raw)
            if cursor in (b"0-0", "0-0"):
                return

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        with available():
            reply: Any = self._redis.xreadgroup(
                keys.GROUP, keys.CONSUMER, {keys.STREAM: ">"}, count=count, block=max(1, int(block_s * 1000))
            )
        if not reply:
            return []
        streams = reply.items() if isinstance(reply, dict) else reply
        return [entry for _, raw in streams for entry in self._decoded(_flat(raw))]

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        with available():
            with self._redis.pipeline(transaction=True) as transaction:
                for session_id, verdict in verdicts.sessions.items():
                    transaction.hset(keys.session(session_id), "verdict", msgspec.json.encode(verdict))
                    transaction.hincrby(keys.VERDICTS, f"session:{verdict.code}", 1)
                    transaction.zrem(keys.DEADLINES, session_id)
                for (session_id, turn_id), verdict in verdicts.turns.items():
                    transaction.hset(keys.session(session_id), f"v:{turn_id}", msgspec.json.encode(verdict))
                    transaction.hincrby(keys.VERDICTS, f"turn:{verdict.code}", 1)
                if entry_ids:
                    transaction.xack(keys.STREAM, keys.GROUP, *entry_ids)
                transaction.execute()
            self._trim()

    def report(self, state: Mapping[str, str | int | float]) -> None:
        with available():
            fields: Any = dict(state)
            self._redis.hset(keys.TRAINER, mapping=fields)

    def _trim(self) -> None:
        """Acknowledging frees no memory; trimming below the oldest entry that is still owed does."""
        pending: Any = self._redis.xpending(keys.STREAM, keys.GROUP)
        oldest_owed = pending["min"]
        if oldest_owed is None:
            groups: Any = self._redis.xinfo_groups(keys.STREAM)
            oldest_owed = next(g["last-delivered-id"] for g in groups if g["name"] == keys.GROUP.encode())
        self._redis.xtrim(keys.STREAM, minid=oldest_owed, approximate=False)

    def _decoded(self, raw: Sequence[RawEntry]) -> Iterator[Entry]:
        for entry_id, fields in raw:
            if entry_id is None or fields is None:  # Redis 6.2 keeps trimmed entries in the pending list
                continue
            try:
                yield Entry(entry_id.decode(), decode(fields.get(keys.STREAM_FIELD, b"")))
            except (InvalidRecord, UnknownSchema) as error:
                self._set_aside(entry_id, fields, error)

    def _set_aside(self, entry_id: bytes, fields: dict[bytes, bytes], error: Exception) -> None:
        """A record nobody can read goes to the dead letters with its bytes, and stops nothing."""
        logger.error("entry %s set aside: %s", entry_id.decode(), error)
        with available(), self._redis.pipeline(transaction=True) as transaction:
            letter: Any = {**fields, b"entry": entry_id, b"error": str(error).encode()}
            transaction.xadd(keys.DEAD_LETTERS, letter)
            transaction.xack(keys.STREAM, keys.GROUP, entry_id)
            transaction.execute()


def _flat(raw: Any) -> Sequence[RawEntry]:
    """redis-py nests the entries of a stream once more under RESP3."""
    return raw[0] if raw and isinstance(raw[0], list) else raw


@contextmanager
def _existing_group() -> Iterator[None]:
    try:
        yield
    except ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):
            raise
