"""Forgets old sessions: removes those that have a verdict and no entry that is still to be acknowledged.

settled sessions, oldest first ─▶ their heads ─▶ one script each: counters replace the head and its other keys

A session is settled when it has a verdict.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.head import SessionHead
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.deletion import traces_of
from rollout_queue.redis.heads.reading import UNREADABLE, batches, read_head
from rollout_queue.redis.scripts import retention as retention_scripts

logger = logging.getLogger(__name__)

FIELDS_AT_ONCE = 500
"""See `batches`."""
ADOPTED_AT_ONCE = 500
ADOPTED_EVERY_S = 3600.0
IDS_KEPT = 250_000
"""How many ids of forgotten sessions and groups are kept, and refused to new ones. A trainer remembers fewer
ids. It would take a new session under an id that it remembers for a late part of the old one."""


class Forgotten(NamedTuple):
    """The result of one call of `forget`."""

    verdicts: Counter[str]
    """How many sessions were forgotten, by verdict."""
    due: int
    """How many sessions were old enough; another gateway may have forgotten some of them."""
    held_by: str
    """The oldest entry that is unread or unacknowledged, if sessions are kept because of it; else empty."""


class RedisForgetter:
    """Forgets sessions on Redis. `redis` returns bytes (decode_responses off). Every method raises
    StorageUnavailable. Several gateways may call it at the same time."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._due = redis.register_script(retention_scripts.DUE)
        self._forget = redis.register_script(retention_scripts.FORGET)
        self._put_off = redis.register_script(retention_scripts.PUT_OFF)
        self._adopt = redis.register_script(retention_scripts.ADOPT)
        self._cursor = self._trained_cursor = 0
        self._adopted_at: float | None = None

    async def forget(self, settled_for_s: float, most: int) -> Forgotten:
        """Forget up to `most` sessions that got their verdict at least `settled_for_s` ago, oldest first."""
        verdicts: Counter[str] = Counter()
        if not await stored(self._redis.exists(keys.SETTLED)):
            return Forgotten(verdicts, 0, "")
        age_ms = int(settled_for_s * 1000)
        named: list[str] = [keys.SETTLED, keys.STREAM]
        reply: list[Any] = await stored(self._due(named, [keys.GROUP, age_ms, most, keys.session("")]))
        before, held_by, *found = reply
        names = [name.decode() for name in found[::2]]
        for batch in batches(zip(names, found[1::2], strict=True), FIELDS_AT_ONCE):
            for name, fields in zip(batch, await self._heads(batch), strict=True):
                if (verdict := await self._forget_one(name, fields, before)) is not None:
                    verdicts[verdict] += 1
        return Forgotten(verdicts, len(names), held_by.decode())

    async def adopt(self) -> None:
        """Note the present time for sessions that got their verdict from an older build, which noted no time.

        Each call looks at some sessions. After the last session, the next round begins an hour later, because
        such a build may still run.
        """
        now = clock.monotonic()
        if self._adopted_at is not None and now - self._adopted_at < ADOPTED_EVERY_S:
            return
        await self._drop_trained()
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

    async def _drop_trained(self) -> None:
        """Remove some sessions without a head from the index of trained ones. A build that knows no such
        index has deleted or forgotten them, and they never get a head again."""
        self._trained_cursor, page = await stored(
            self._redis.zscan(keys.TRAINED, cursor=self._trained_cursor, count=ADOPTED_AT_ONCE)
        )
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name, _ in page:
                pipeline.exists(keys.session(name.decode()))
            there = await stored(pipeline.execute())
        if gone := [name for (name, _), exists in zip(page, there, strict=True) if not exists]:
            await stored(self._redis.zrem(keys.TRAINED, *gone))  # bounded: ADOPTED_AT_ONCE

    async def _heads(self, names: Sequence[str]) -> list[Mapping[bytes, bytes]]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hgetall(keys.session(name))
            heads: list[Mapping[bytes, bytes]] = await stored(pipeline.execute())
        return heads

    async def _forget_one(self, session_id: str, fields: Mapping[bytes, bytes], before: bytes) -> str | None:
        """The verdict of the forgotten session; None if it was kept, or forgotten by another gateway."""
        try:
            head = read_head(fields)
        except UNREADABLE as error:
            # Its turns cannot be counted. It is tried again later, because a newer build may have written it
            # and may be running by then.
            logger.warning("session %s cannot be read and is kept: %s", session_id, error)
            await stored(self._put_off([keys.SETTLED, keys.STREAM], [session_id]))
            return None
        if head is None:
            await stored(self._redis.zrem(keys.SETTLED, session_id))
            return None
        verdict: bytes | None = await stored(self._forget(*_forgetting(head, len(fields), before)))
        return None if verdict is None else verdict.decode()


def forgotten_sessions(counts: Mapping[bytes, bytes]) -> int:
    """How many sessions were forgotten, from the counters of `weir:forgotten`."""
    return sum(int(number) for name, number in counts.items() if name.startswith(b"session:"))


def _forgetting(
    head: SessionHead, seen: int, before: bytes
) -> tuple[list[str], list[str | bytes | int | float]]:
    """Keys and arguments of FORGET. `seen` is how many fields the session's hash had."""
    session_id, group_id = head.spec.session_id, head.spec.group_id or ""
    traces, numbers = traces_of(head)
    named: list[str] = [
        keys.session(session_id),
        keys.SETTLED,
        keys.SESSIONS,
        keys.FORGOTTEN,
        keys.FORGOTTEN_IDS,
    ]
    named += [keys.group(group_id), keys.group_members(group_id), *traces]
    arguments: list[str | bytes | int | float] = [session_id, seen, before, keys.session(""), group_id]
    arguments += [IDS_KEPT, *numbers]
    for turn in head.turns:
        arguments += [turn.turn_id, len(turn.output_ids)]
    return named, arguments
