"""Forgets sessions that are settled, and that no entry of the stream is of any more.

settled, oldest first ─▶ heads ─▶ one script each: the head and all that leads to it give way to counters
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis

from rollout_queue.contract.head import SessionHead
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.deletion import traces_of
from rollout_queue.redis.scripts import retention as retention_scripts
from rollout_queue.redis.writer import UNREADABLE, read_head

logger = logging.getLogger(__name__)

FIELDS_AT_ONCE = 500
"""Fields, most of them turns, that are read at once; a larger session comes alone."""
ADOPTED_AT_ONCE = 500
ADOPTED_EVERY_S = 3600.0
IDS_KEPT = 250_000
"""Ids of forgotten sessions and groups that are not given again. More than a trainer remembers of both, which
takes what comes under an id that it has settled for a straggler."""


class Forgotten(NamedTuple):
    """What one look at the oldest settled sessions came to."""

    verdicts: Counter[str]
    """How many sessions were forgotten, by verdict."""
    due: int
    """How many could be looked at; another gateway may have forgotten some of them."""
    held_by: str
    """The entry of the stream, owed by a trainer, that keeps all others; empty where time alone does."""


class RedisForgetter:
    """Forgets on Redis. `redis` returns bytes (decode_responses off). Every method raises StorageUnavailable;
    any number of gateways may call it at once."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._due = redis.register_script(retention_scripts.DUE)
        self._forget = redis.register_script(retention_scripts.FORGET)
        self._put_off = redis.register_script(retention_scripts.PUT_OFF)
        self._adopt = redis.register_script(retention_scripts.ADOPT)
        self._cursor = 0
        self._adopted_at: float | None = None

    async def forget(self, settled_for_s: float, most: int) -> Forgotten:
        """Forget up to `most` sessions that were settled at least so long ago, the oldest first."""
        verdicts: Counter[str] = Counter()
        if not await stored(self._redis.exists(keys.SETTLED)):
            return Forgotten(verdicts, 0, "")
        age_ms = int(settled_for_s * 1000)
        named = [keys.SETTLED, keys.STREAM]
        reply: list[Any] = await stored(self._due(named, [keys.GROUP, age_ms, most, keys.session("")]))
        before, held_by, *found = reply
        names = [name.decode() for name in found[::2]]
        for batch in _batches(names, found[1::2]):
            for name, fields in zip(batch, await self._heads(batch), strict=True):
                if (verdict := await self._forget_one(name, fields, before)) is not None:
                    verdicts[verdict] += 1
        return Forgotten(verdicts, len(names), held_by.decode())

    async def adopt(self) -> None:
        """Look through some more of the sessions for those that an older build has settled; through all of
        them once an hour, since such a build may run beside this one."""
        now = time.monotonic()
        if self._adopted_at is not None and now - self._adopted_at < ADOPTED_EVERY_S:
            return
        cursor, page = await stored(
            self._redis.zscan(keys.SESSIONS, cursor=self._cursor, count=ADOPTED_AT_ONCE)
        )
        names = [name.decode() for name, _ in page]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hexists(keys.session(name), "verdict")
            decided = [name for name, has in zip(names, await stored(pipeline.execute()), strict=True) if has]
        if decided:
            await stored(self._adopt([keys.SETTLED, keys.STREAM, *map(keys.session, decided)], decided))
        self._cursor, self._adopted_at = cursor, None if cursor else now

    async def _heads(self, names: Sequence[str]) -> list[Mapping[bytes, bytes]]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hgetall(keys.session(name))
            heads: list[Mapping[bytes, bytes]] = await stored(pipeline.execute())
        return heads

    async def _forget_one(self, session_id: str, fields: Mapping[bytes, bytes], before: bytes) -> str | None:
        """Its verdict; None where it stays, or somebody else has forgotten it."""
        try:
            head = read_head(fields)
        except UNREADABLE as error:
            # Nobody could say what was forgotten. It may be a newer build's: it comes up again in its turn.
            logger.warning("session %s is not forgotten: %s", session_id, error)
            await stored(self._put_off([keys.SETTLED, keys.STREAM], [session_id]))
            return None
        if head is None:
            await stored(self._redis.zrem(keys.SETTLED, session_id))
            return None
        verdict: bytes | None = await stored(self._forget(*_forgetting(head, len(fields), before)))
        return None if verdict is None else verdict.decode()


def forgotten_sessions(counts: Mapping[bytes, bytes]) -> int:
    """How many, by the counters of `weir:forgotten`."""
    return sum(int(number) for name, number in counts.items() if name.startswith(b"session:"))


def _batches(names: Sequence[str], sizes: Sequence[int]) -> Iterator[list[str]]:
    batch: list[str] = []
    fields = 0
    for name, size in zip(names, sizes, strict=True):
        if batch and fields + size > FIELDS_AT_ONCE:
            yield batch
            batch, fields = [], 0
        batch.append(name)
        fields += size
    if batch:
        yield batch


def _forgetting(
    head: SessionHead, seen: int, before: bytes
) -> tuple[list[str], list[str | bytes | int | float]]:
    """Keys and arguments of the script."""
    session_id, group_id = head.spec.session_id, head.spec.group_id or ""
    traces, numbers = traces_of(head)
    named = [keys.session(session_id), keys.SETTLED, keys.SESSIONS, keys.FORGOTTEN, keys.FORGOTTEN_IDS]
    named += [keys.group(group_id), keys.group_members(group_id), *traces]
    arguments: list[str | bytes | int | float] = [session_id, seen, before, keys.session(""), group_id]
    arguments += [IDS_KEPT, *numbers]
    for turn in head.turns:
        arguments += [turn.turn_id, len(turn.output_ids)]
    return named, arguments
