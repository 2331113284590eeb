"""The heads of sessions for agents' calls, from memory as far as possible.

HLEN ──as many fields as in memory──▶ the cached head
  ├────more─────▶ HKEYS, HMGET of the turns that are missing: other gateways appended them
  └────unknown──▶ HKEYS, HMGET of all

A session may have tens of megabytes. So HMGET reads it in pieces: no other call waits for all of it, neither
for the connection that all share nor for the event loop.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec

from rollout_queue.contract.codec import decode
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.connection.pipelined import PipelinedConnection
from rollout_queue.redis.heads.cache import HeadCache
from rollout_queue.redis.heads.reading import read_head, reading

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
        key = keys.session(session_id)
        fields: int = await stored(self._connection.command("HLEN", key))
        if not fields:
            self._cache.drop(session_id)
            return None
        cached = self._cache.get(session_id)
        if cached is not None and cached.fields == fields:
            self.hits += 1
            return KnownHead(fields, cached.head)
        self.misses += 1
        # bounded: one session
        names: list[bytes] = await stored(self._connection.command("HKEYS", key))
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
        turns = tuple(sorted((*old.turns, *new.turns), key=_finished_at))
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
            values: list[bytes | None] = await stored(self._connection.command("HMGET", key, *piece))
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
        return msgspec.structs.replace(head, turns=tuple(sorted(turns, key=_finished_at)))


def _finished_at(turn: Turn) -> float:
    return turn.finished_at
