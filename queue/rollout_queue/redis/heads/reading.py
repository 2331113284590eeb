"""Reads sessions from their hashes."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.codec import decode, decode_spec
from rollout_queue.contract.errors import InvalidRecord, StorageUnavailable, UnknownSchema
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Outcome, Reward, Turn, Verdict
from rollout_queue.contract.turn_parts.sums import TurnSums, decode_sums
from rollout_queue.redis.availability import stored

logger = logging.getLogger(__name__)

UNREADABLE = (InvalidRecord, UnknownSchema, msgspec.DecodeError)
"""What `read_head` raises for a session that this build cannot read."""


@contextmanager
def reading(session_id: str) -> Iterator[None]:
    """Raises StorageUnavailable when this build cannot read a record of the session. It may be a record of a
    newer build, so the call may succeed at another gateway."""
    try:
        yield
    except UNREADABLE as error:
        raise StorageUnavailable(f"this build cannot read session {session_id}: {error}") from error


class _VerdictCode(msgspec.Struct):
    code: str


def verdict_code(session_id: str, verdict: bytes) -> str:
    """The code of a stored verdict; empty if it cannot be read. Such a session counts as decided as well."""
    try:
        return msgspec.json.decode(verdict, type=_VerdictCode).code
    except msgspec.DecodeError as error:
        logger.error("the verdict of session %s cannot be read and is kept: %s", session_id, error)
        return ""


def batches(sizes: Iterable[tuple[str, int]], fields_at_once: int) -> Iterator[list[str]]:
    """Groups the ids of sessions into batches to read at once. `sizes` has each id and its number of fields.

    A batch has at most `fields_at_once` fields (most are turns), unless it is a single session with more.
    """
    batch: list[str] = []
    fields = 0
    for session_id, size in sizes:
        if batch and fields + size > fields_at_once:
            yield batch
            batch, fields = [], 0
        batch.append(session_id)
        fields += size
    if batch:
        yield batch


def pages_of(names: Collection[str], most: int) -> Iterator[list[str]]:
    """The names, at most so many at once."""
    named = list(names)
    return (named[start : start + most] for start in range(0, len(named), most))


def readable_head(session_id: str, fields: Mapping[bytes, bytes]) -> SessionHead | None:
    """The head; None if it cannot be read, so that a list goes on without it. The log has the reason."""
    try:
        return read_head(fields)
    except UNREADABLE as error:
        logger.error("session %s cannot be read and is left out of a list: %s", session_id, error)
        return None


async def fields_without_turns(redis: Redis, key: str) -> dict[bytes, bytes]:
    """The fields of a session's hash, except those of its turns. Raises StorageUnavailable."""
    names: list[bytes] = await stored(redis.hkeys(key))  # bounded: one session
    others = [name for name in names if name[:2] not in (b"t:", b"v:", b"n:", b"q:", b"e:")]
    # bounded: one session
    values: list[bytes | None] = await stored(redis.hmget(key, others)) if others else []
    return {name: value for name, value in zip(others, values, strict=True) if value is not None}


def read_head(fields: Mapping[bytes, bytes]) -> SessionHead | None:
    """A session's head from the fields of its hash; None when the hash has no spec."""
    if b"spec" not in fields:
        return None
    turns: list[Turn] = []
    rewards: list[Reward] = []
    turn_verdicts: dict[str, Verdict] = {}
    trained_tokens: dict[str, bytes] = {}
    for field, value in fields.items():
        match field[:2]:
            case b"t:":
                turns.append(cast(Turn, decode(value)))
            case b"r:":
                rewards.append(cast(Reward, decode(value)))
            case b"v:":
                turn_verdicts[field[2:].decode()] = msgspec.json.decode(value, type=Verdict)
            case b"n:":
                trained_tokens[field[2:].decode()] = value
    outcome, verdict = fields.get(b"outcome"), fields.get(b"verdict")
    return SessionHead(
        spec=decode_spec(fields[b"spec"]),
        turns=tuple(sorted(turns, key=lambda turn: turn.finished_at)),
        rewards=tuple(sorted(rewards, key=lambda reward: reward.created_at)),
        outcome=cast(Outcome, decode(outcome)) if outcome else None,
        verdict=msgspec.json.decode(verdict, type=Verdict) if verdict else None,
        turn_verdicts=turn_verdicts,
        trained_tokens=trained_tokens,
        beaten_at=float(fields.get(b"beat", 0)),
    )


def read_summary(fields: Mapping[bytes, bytes], turns: int) -> SessionHead | None:
    """A head without its turns, from the other fields of its hash, which has `turns` turns.

    None when the hash has no spec. Raises InvalidRecord also if the sums are not those of all turns, because
    a process of an older build appended some of them.
    """
    head = read_head(fields)
    if head is None:
        return None
    sums = decode_sums(fields[b"turns"]) if b"turns" in fields else TurnSums()
    if sums.turns != turns:
        raise InvalidRecord(f"the sums are of {sums.turns} turns, and the session has {turns}")
    return msgspec.structs.replace(head, unread=sums)
