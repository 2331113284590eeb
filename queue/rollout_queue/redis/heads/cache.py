"""A cache of the session heads that this process used last, so that a call need not read all turns again.

A session's head is everything that is stored about it, in a hash. The hash only gains fields, so a cached
head has all turns if the hash still has as many fields; otherwise it has the first of them. Only heartbeats
and verdicts may replace a value. The hash of a deleted session has no field, and never gets any again.
"""

from collections import OrderedDict

import msgspec

from rollout_queue.contract.codec import encode
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn

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
