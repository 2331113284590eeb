"""The heads of sessions for agents' calls, from memory as far as possible.

HLEN ──as many fields as in memory──▶ the cached head
  ├────more─────▶ HKEYS, HMGET of the turns that are missing: other gateways appended them
  └────unknown──▶ HKEYS, HMGET of all

A session may have tens of megabytes. So HMGET reads it in pieces: no other call waits for all of it, neither
for the connection that all share nor for the event loop.

HeadCache has the heads that this process used last, so that a call need not read all turns again. A session's
head is everything that is stored about it, in a hash. The hash only gains fields, so a cached head has all
turns if the hash still has as many fields; otherwise it has the first of them. Only heartbeats and verdicts
may replace a value. The hash of a deleted session has no field, and never gets any again.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import NamedTuple, cast

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.codec import decode, decode_spec, encode
from rollout_queue.contract.errors import InvalidRecord, StorageUnavailable, UnknownSchema
from rollout_queue.contract.head import SessionHead, TurnSums, decode_sums
from rollout_queue.contract.records import Outcome, Reward, Turn, Verdict
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.pipelined import PipelinedConnection

logger = logging.getLogger(__name__)


CACHE_BYTES = 512 * 2**20
"""A session of 20,000 tokens in 20 turns takes 144 KB, so this holds 3,700 of them."""
CONTEXT_BYTES, OUTPUT_BYTES = 4, 8
"""A token of the context is an int32; a sampled token has a logprob, too, which is a float32."""
TURN_BYTES = 3072
"""The memory that a turn takes beside its tokens: the object, its ids and digests, its sampling."""
SESSION_BYTES = 4096
"""The memory that a session takes beside its turns and its own bytes."""


class CachedHead(msgspec.Struct, frozen=True, gc=False):
    """A head, how many fields its hash had, and how many bytes of memory it takes."""

    fields: int
    head: SessionHead
    size: int


class HeadCache:
    """Drops the least recently used heads while they take more than `limit` bytes of memory."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._held = 0
        self._seen: OrderedDict[str, CachedHead] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def session_ids(self) -> list[str]:
        return list(self._seen)

    def get(self, session_id: str) -> CachedHead | None:
        """The head, which is up to date if the session's hash still has `fields` fields."""
        if (seen := self._seen.get(session_id)) is not None:
            self._seen.move_to_end(session_id)
        return seen

    def put(self, fields: int, head: SessionHead) -> None:
        self.drop(head.spec.session_id)
        if any(turn.experts is not None for turn in head.turns):
            head = msgspec.structs.replace(head, turns=tuple(map(_without_experts, head.turns)))
        size = SESSION_BYTES + len(encode(head.spec)) + sum(map(_size, head.turns))
        self._seen[head.spec.session_id] = CachedHead(fields, head, size)
        self._held += size
        self._shrink()

    def grow(self, before: int, after: int, turn: Turn) -> None:
        """Add a turn that was appended: the hash had `before` fields, and has `after` now."""
        seen = self._seen.get(turn.session_id)
        if seen is None or after == before or seen.fields != before:
            return  # another process may have written in between: the next call reads what is missing
        head = msgspec.structs.replace(seen.head, turns=(*seen.head.turns, _without_experts(turn)))
        self._held += (added := _size(turn))
        self._seen[turn.session_id] = CachedHead(after, head, seen.size + added)
        self._seen.move_to_end(turn.session_id)
        if self._held > self._limit:
            self._shrink()

    def _shrink(self) -> None:
        while self._held > self._limit and self._seen:
            _, oldest = self._seen.popitem(last=False)
            self._held -= oldest.size

    def clear(self) -> None:
        self._seen.clear()
        self._held = 0

    def drop(self, session_id: str) -> None:
        if (seen := self._seen.pop(session_id, None)) is not None:
            self._held -= seen.size


def _without_experts(turn: Turn) -> Turn:
    """The turn without its largest part, which only the trainer reads."""
    return turn if turn.experts is None else msgspec.structs.replace(turn, experts=None)


def _size(turn: Turn) -> int:
    return TURN_BYTES + CONTEXT_BYTES * len(turn.context_ids) + OUTPUT_BYTES * len(turn.output_ids)


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

    None as for `read_head`. Raises InvalidRecord also if the sums are not those of all turns, because
    a process of an older build appended some of them.
    """
    head = read_head(fields)
    if head is None:
        return None
    sums = decode_sums(fields[b"turns"]) if b"turns" in fields else TurnSums()
    if sums.turns != turns:
        raise InvalidRecord(f"the sums are of {sums.turns} turns, and the session has {turns}")
    return msgspec.structs.replace(head, unread=sums)


NOT_FOR_CALLS = (b"n:", b"q:", b"e:")
"""Fields that no call needs: numbers of trained turns, marks of retried requests, and ids of entries."""
PIECE_BYTES, FIRST_FIELDS, MOST_FIELDS = 2**18, 4, 64
"""What one HMGET reads: about so many bytes, judged by the piece before. A field is at most one turn."""


class KnownHead(NamedTuple):
    """A session's head, and how many fields its hash had when it was read."""

    fields: int
    head: SessionHead


class SessionHeads:
    """Reads heads, and keeps those that were used last."""

    def __init__(self, connection: PipelinedConnection, cache: HeadCache) -> None:
        self._connection = connection
        self._cache = cache
        self.hits = self.misses = 0
        """How often a head in memory was up to date, and how often Redis had to be read."""

    async def load(self, session_id: str) -> KnownHead | None:
        """The head with all of its turns; None if there is no such session. Raises StorageUnavailable."""
        key = key_names.session(session_id)
        fields: int = await self._connection.command("HLEN", key)
        if not fields:
            self._cache.drop(session_id)
            return None
        cached = self._cache.get(session_id)
        if cached is not None and cached.fields == fields:
            self.hits += 1
            return KnownHead(fields, cached.head)
        self.misses += 1
        # bounded: one session
        names: list[bytes] = await self._connection.command("HKEYS", key)
        known = None if cached is None else await self._completed(key, names, cached.head)
        if known is None:
            head = await self._head(key, session_id, names)
            known = None if head is None else KnownHead(len(names), head)
        if known is not None:
            self._cache.put(*known)
        return known

    async def _completed(self, key: str, names: Sequence[bytes], old: SessionHead) -> KnownHead | None:
        """The head with the turns that are missing in `old`. None if it is of another session by now."""
        present = {b"t:%b" % turn_id.encode() for turn_id in old.by_id}
        if not present.issubset(names):
            return None
        missing = [name for name in names if name not in present and name[:2] != b"v:"]
        new = await self._head(key, old.spec.session_id, missing)
        if new is None or new.spec != old.spec:
            return None
        turns = tuple(sorted((*old.turns, *new.turns), key=attrgetter("finished_at")))
        return KnownHead(
            len(names), msgspec.structs.replace(new, turns=turns, turn_verdicts=old.turn_verdicts)
        )

    async def _head(self, key: str, session_id: str, names: Sequence[bytes]) -> SessionHead | None:
        """The head that these fields make. None if it has no spec."""
        left = [name for name in names if name[:2] not in NOT_FOR_CALLS]
        turns, others, count = list[Turn](), dict[bytes, bytes](), FIRST_FIELDS
        while left:
            piece, left = left[:count], left[count:]
            # bounded: MOST_FIELDS
            values: list[bytes | None] = await self._connection.command("HMGET", key, *piece)
            found = {name: value for name, value in zip(piece, values, strict=True) if value is not None}
            with reading(session_id):
                turns += [cast(Turn, decode(value)) for name, value in found.items() if name[:2] == b"t:"]
            others |= {name: value for name, value in found.items() if name[:2] != b"t:"}
            size = sum(map(len, found.values()))
            count = max(1, min(MOST_FIELDS, 2 * count, count * PIECE_BYTES // max(size, 1)))
        with reading(session_id):
            head = read_head(others)
        if head is None:
            return None
        return msgspec.structs.replace(head, turns=tuple(sorted(turns, key=attrgetter("finished_at"))))
