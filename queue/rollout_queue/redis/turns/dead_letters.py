"""Appends dead letters to the stream again, once this build can read them.

weir:dead ─▶ is it a record? ─▶ does its session wait for it? ─▶ one script: append it, remove the letter

A trainer that is older than a gateway cannot read the gateway's records, and sets them aside. While their
sessions have no verdict, a newer trainer can still train them. A run that is killed may be repeated, because
one script moves each letter.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from redis import Redis

from rollout_queue.contract.codec import decode
from rollout_queue.contract.episodes import CLOSING
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.records import Deletion
from rollout_queue.redis import keys
from rollout_queue.redis.availability import available
from rollout_queue.redis.heads.reading import verdict_code

PAGE = 50
"""How many letters are read at once. Redis serves nobody else meanwhile."""
MOVE = """
-- KEYS: dead letters, stream, session   ARGV: letter, record
-- Appends the record, and removes its letter. Returns 0 if the letter or its session is gone.
if redis.call('EXISTS', KEYS[3]) == 0 then return 0 end
if not redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1] then return 0 end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
return redis.call('XDEL', KEYS[1], ARGV[1])
"""

Fate = Literal["requeued", "unreadable", "decided", "gone"]
"""unreadable: not by this build. decided: its session has its verdict. gone: its session was deleted or
forgotten."""


class Letter(NamedTuple):
    """A dead letter, and what becomes of it."""

    letter_id: bytes
    fate: Fate
    packed: bytes = b""
    why: str = ""
    """Why it cannot be read."""
    needs: keys.Key = keys.DELETED
    """Without this key, it is not appended: that of its session."""


def requeue(redis: Redis, *, dry_run: bool = False, discard: bool = False) -> Iterator[Letter]:
    """Append what this build can read, in the order in which it was set aside; yield each letter.

    With `discard`, letters that cannot be trained any more are removed: those whose session has its verdict,
    or is gone. With `dry_run`, nothing is changed. Raises StorageUnavailable. `redis` returns bytes.
    """
    move = redis.register_script(MOVE)
    for letter in _letters(redis):
        with available():
            if letter.fate == "requeued" and not dry_run:
                named = [keys.DEAD_LETTERS, keys.STREAM, letter.needs]
                if not move(named, [letter.letter_id, letter.packed]):
                    continue  # another run has moved it, or its session was just deleted
            if discard and letter.fate in ("decided", "gone") and not dry_run:
                redis.xdel(keys.DEAD_LETTERS, letter.letter_id)
        yield letter


def _letters(redis: Redis) -> Iterator[Letter]:
    """All that are there now, the oldest first. What a trainer sets aside meanwhile is for the next run."""
    with available():
        newest: Any = redis.xrevrange(keys.DEAD_LETTERS, count=1)
    start, end = "-", newest[0][0] if newest else "-"
    while page := _page(redis, start, end):
        start = f"({page[-1][0].decode()}"
        for letter_id, fields in page:
            yield _judged(redis, letter_id, fields.get(keys.STREAM_FIELD, b""))


def _page(redis: Redis, start: str, end: bytes | str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    with available():
        found: Any = redis.xrange(keys.DEAD_LETTERS, start, end, PAGE)
    return list(found)


def _judged(redis: Redis, letter_id: bytes, packed: bytes) -> Letter:
    try:
        record = decode(packed)
    except (InvalidRecord, UnknownSchema) as error:
        return Letter(letter_id, "unreadable", why=str(error))
    if isinstance(record, Deletion):
        return Letter(letter_id, "requeued", packed)
    session = keys.session(record.session_id)
    with available():
        found: Any = redis.hmget(session, "spec", "verdict")
    spec, verdict = found
    if spec is None:
        return Letter(letter_id, "gone")
    if verdict is not None and verdict_code(record.session_id, verdict) not in CLOSING:
        return Letter(letter_id, "decided")
    return Letter(letter_id, "requeued", packed, needs=session)
