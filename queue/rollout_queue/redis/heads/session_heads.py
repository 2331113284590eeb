"""The heads of sessions for agents' calls, from memory as far as possible.

HLEN ──as many fields as in memory──▶ the cached head
  ├────more─────▶ HKEYS, HMGET of the turns that are missing: other gateways appended them
  └────unknown──▶ HGETALL
"""

from typing import NamedTuple

import msgspec

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.connection.pipelined import PipelinedConnection
from rollout_queue.redis.heads.cache import HeadCache
from rollout_queue.redis.heads.reading import read_head, reading

NOT_FOR_CALLS = (b"v:", b"n:", b"q:")
"""Fields that no call needs: verdicts and numbers of trained turns, and marks of retried requests."""


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
        known = None if cached is None else await self._completed(key, cached.head)
        if known is None:
            known = await self._whole(key, session_id)
        if known is not None:
            self._cache.put(*known)
        return known

    async def _whole(self, key: str, session_id: str) -> KnownHead | None:
        listed = await stored(self._connection.command("HGETALL", key))
        found = listed if isinstance(listed, dict) else dict(zip(listed[::2], listed[1::2], strict=True))
        with reading(session_id):
            head = read_head({name: value for name, value in found.items() if name[:2] != b"n:"})
        return None if head is None else KnownHead(len(found), head)

    async def _completed(self, key: str, old: SessionHead) -> KnownHead | None:
        """The head with the turns that are missing in `old`. None if it is of another session by now."""
        names: list[bytes] = await stored(self._connection.command("HKEYS", key))
        present = {b"t:%b" % turn_id.encode() for turn_id in old.by_id}
        if not present.issubset(names):
            return None
        missing = [name for name in names if name not in present and name[:2] not in NOT_FOR_CALLS]
        values: list[bytes | None] = await stored(self._connection.command("HMGET", key, *missing))
        found = {name: value for name, value in zip(missing, values, strict=True) if value is not None}
        with reading(old.spec.session_id):
            new = read_head(found)
        if new is None or new.spec != old.spec:
            return None
        turns = tuple(sorted((*old.turns, *new.turns), key=_finished_at))
        return KnownHead(
            len(names), msgspec.structs.replace(new, turns=turns, turn_verdicts=old.turn_verdicts)
        )


def _finished_at(turn: Turn) -> float:
    return turn.finished_at
