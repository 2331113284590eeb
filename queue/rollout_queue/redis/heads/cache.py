"""A cache of the session heads that this process used last, so that a call need not read all turns again.

A session's head is everything that is stored about it, in a hash. The hash only gains fields, so a cached
head has all turns if the hash still has as many fields. Only heartbeats and verdicts may replace a value.
The hash of a deleted session has no field, and never gets any again.
"""

from collections import OrderedDict

import msgspec

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn

OVERHEAD = 256
"""The memory that a turn or a session takes beside its tokens, in tokens."""


class CachedHead(msgspec.Struct, frozen=True, gc=False):
    """A head, how many fields its hash had, and its size in tokens."""

    fields: int
    head: SessionHead
    tokens: int


class HeadCache:
    """Drops the least recently used heads beyond `limit`, which is in tokens of about 8 bytes each."""

    def __init__(self, limit: int = 2**22) -> None:
        self._limit = limit
        self._held = 0
        self.hits = self.misses = 0
        """How often `get` found a head, and how often none."""
        self._seen: OrderedDict[str, CachedHead] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def session_ids(self) -> list[str]:
        return list(self._seen)

    def get(self, session_id: str, fields: int) -> SessionHead | None:
        """The head of a session whose hash has `fields` fields; None if no such head is cached."""
        seen = self._seen.get(session_id)
        if seen is not None and seen.fields == fields:
            self.hits += 1
            return seen.head
        self.misses += 1
        return None

    def put(self, fields: int, head: SessionHead) -> None:
        self.drop(head.spec.session_id)
        seen = CachedHead(fields, head, OVERHEAD + sum(map(_size, head.turns)))
        self._seen[head.spec.session_id] = seen
        self._held += seen.tokens
        self._shrink()

    def grow(self, before: int, after: int, turn: Turn) -> None:
        """Add a turn that was appended: the hash had `before` fields, and has `after` now."""
        seen = self._seen.get(turn.session_id)
        if seen is None or after == before:
            return
        if seen.fields != before:  # another process wrote in between
            self.drop(turn.session_id)
            return
        head = msgspec.structs.replace(seen.head, turns=(*seen.head.turns, turn))
        self._held += (added := _size(turn))
        self._seen[turn.session_id] = CachedHead(after, head, seen.tokens + added)
        self._seen.move_to_end(turn.session_id)
        self._shrink()

    def _shrink(self) -> None:
        while self._held > self._limit and self._seen:
            _, oldest = self._seen.popitem(last=False)
            self._held -= oldest.tokens

    def clear(self) -> None:
        self._seen.clear()
        self._held = 0

    def drop(self, session_id: str) -> None:
        if (seen := self._seen.pop(session_id, None)) is not None:
            self._held -= seen.tokens


def _size(turn: Turn) -> int:
    return OVERHEAD + len(turn.context_ids) + len(turn.output_ids)
