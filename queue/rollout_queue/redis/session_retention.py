"""Forgets old sessions: removes those that have a verdict and no entry that is still to be acknowledged.

settled sessions, oldest first ─▶ their heads ─▶ one script each: counters replace the head and its other keys

A session is settled when it has a verdict.

Any gateway may repeat the scripts.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.head import SessionHead
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.lua import LAST_DELIVERED, REMOVE_REFERENCES, SETTLE, Argument, Script
from rollout_queue.redis.session_deletion import traces_of
from rollout_queue.redis.session_heads import UNREADABLE, batches, read_head

logger = logging.getLogger(__name__)


DUE = Script[list[Any]](
    LAST_DELIVERED
    + """
-- KEYS: settled, stream   ARGV: group, settled for how many ms, count, prefix of session keys
-- Returns a list: first, the time in ms by the stream's clock until which a session must have been settled to
-- be forgotten; second, the oldest unread or unacknowledged entry, if it decides that time, else ''; then the
-- id and the number of fields of each of up to `count` such sessions, the oldest first.
-- A session is settled after all its entries were appended. So a session that was settled before the oldest
-- unread or unacknowledged entry was appended has no unread or unacknowledged entry.
local time = redis.call('TIME')
local before = time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[2]
local oldest = ''
local function keep_from(id)
    local moment = id and tonumber(string.match(id, '%d+')) - 1
    if moment and moment < before then before, oldest = moment, id end
end
if redis.call('EXISTS', KEYS[2]) == 1 then
    local delivered = last_delivered(KEYS[2], ARGV[1])
    if delivered then keep_from(redis.call('XPENDING', KEYS[2], ARGV[1])[2]) end
    local unread = redis.call('XRANGE', KEYS[2], delivered and '(' .. delivered or '-', '+', 'COUNT', 1)[1]
    keep_from(unread and unread[1])
end
local found = {string.format('%.0f', before), oldest}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', before, 'LIMIT', 0, ARGV[3])) do
    found[#found + 1] = id
    found[#found + 1] = redis.call('HLEN', ARGV[4] .. id)
end
return found
"""
)

FORGET = Script[bytes | None](
    REMOVE_REFERENCES
    + """
-- KEYS: session, settled, sessions, forgotten, forgotten ids, group, members, sorted set…, user…, response…,
--       (image, sessions that show it)…, continuation…
-- ARGV: id, seen, before, prefix of session keys, group, ids kept, how many sorted sets, users, responses and
--       images, (turn, tokens)…
-- `seen` is how many fields the session had when its head was read.
-- Returns the verdict; nothing if another gateway has forgotten the session, or the session has changed
-- since then.
local session, id = KEYS[1], ARGV[1]
local function code(verdict) return verdict and string.match(verdict, '"code":%s*"([^"]*)"') end
local since, verdict = redis.call('ZSCORE', KEYS[2], id), code(redis.call('HGET', session, 'verdict'))
if not since or tonumber(since) > tonumber(ARGV[3]) or not verdict then return nil end
if redis.call('HLEN', session) ~= tonumber(ARGV[2]) then return nil end
local counts = {['session:' .. verdict] = 1}
for at = 11, #ARGV, 2 do -- bounded: one session
    local own = code(redis.call('HGET', session, 'v:' .. ARGV[at]))
    if own then counts['turn:' .. own] = (counts['turn:' .. own] or 0) + 1 end
    if own == 'trained' then counts['tokens:trained'] = (counts['tokens:trained'] or 0) + ARGV[at + 1] end
end
-- This comes first and frees memory, so that a full Redis refuses none of the writes below.
redis.call('DEL', session)
redis.call('ZREM', KEYS[2], id)
redis.call('ZREM', KEYS[3], id)
for name, number in pairs(counts) do redis.call('HINCRBY', KEYS[4], name, number) end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[5], now, 's:' .. id)
local function any_left()
    for _, member in ipairs(redis.call('SMEMBERS', KEYS[7])) do -- bounded: the group's size
        if redis.call('EXISTS', ARGV[4] .. member) == 1 then return true end
    end
end
local size = ARGV[5] ~= '' and (redis.call('HGET', KEYS[6], 'size') or '')
if size == '' then -- a group of no fixed size loses its member
    redis.call('SREM', KEYS[7], id)
    if redis.call('EXISTS', KEYS[7]) == 0 then redis.call('DEL', KEYS[6]) end
elseif size and any_left() then -- a group of fixed size keeps the id, so that no session takes its place
    redis.call('HINCRBY', KEYS[6], 'forgotten', 1)
elseif size then
    local owner = redis.call('HGET', KEYS[6], 'owner') or ''
    redis.call('DEL', KEYS[6], KEYS[7])
    redis.call('ZADD', KEYS[5], now, 'g:' .. ARGV[5])
    if owner ~= '' then redis.call('ZADD', KEYS[5], now, 'o:' .. owner .. ':' .. ARGV[5]) end
end
redis.call('ZREMRANGEBYRANK', KEYS[5], 0, -1 - ARGV[6])
remove_references(8, ARGV[7], ARGV[8], ARGV[9], ARGV[10])
return verdict
"""
)

PUT_OFF = Script[None](
    SETTLE
    + """
-- KEYS: settled, stream   ARGV: id
-- Treats the session as settled now, so that it is looked at again later.
redis.call('ZREM', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then settle(KEYS[1], KEYS[2], ARGV[1]) end
"""
)

ADOPT = Script[None](
    SETTLE
    + """
-- KEYS: settled, stream, session…   ARGV: id…
-- Notes the present time for each session that has a verdict and no time of its verdict.
redis.call('ZREM', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
for at = 3, #KEYS do -- bounded: ADOPTED_AT_ONCE
    local id = ARGV[at - 2]
    if redis.call('HEXISTS', KEYS[at], 'verdict') == 1 and not redis.call('ZSCORE', KEYS[1], id) then
        settle(KEYS[1], KEYS[2], id)
    end
end
"""
)


SETTLED_IN = (key_names.SETTLED, key_names.STREAM)
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
        self._cursor = self._trained_cursor = 0
        self._adopted_at: float | None = None

    async def forget(self, settled_for_s: float, most: int) -> Forgotten:
        """Forget up to `most` sessions that got their verdict at least `settled_for_s` ago, oldest first."""
        verdicts: Counter[str] = Counter()
        if not await stored(self._redis.exists(key_names.SETTLED)):
            return Forgotten(verdicts, 0, "")
        age_ms = int(settled_for_s * 1000)
        arguments = (key_names.GROUP, age_ms, most, key_names.session(""))
        before, held_by, *found = await DUE.run(self._redis, SETTLED_IN, arguments)
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
            self._redis.zscan(key_names.SESSIONS, cursor=self._cursor, count=ADOPTED_AT_ONCE)
        )
        names = [name.decode() for name, _ in page]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hexists(key_names.session(name), "verdict")
            decided = [name for name, has in zip(names, await stored(pipeline.execute()), strict=True) if has]
        if decided:
            await ADOPT.run(self._redis, [*SETTLED_IN, *map(key_names.session, decided)], decided)
        self._cursor, self._adopted_at = cursor, None if cursor else now

    async def _drop_trained(self) -> None:
        """Remove some sessions without a head from the index of trained ones. A build that knows no such
        index has deleted or forgotten them, and they never get a head again."""
        self._trained_cursor, page = await stored(
            self._redis.zscan(key_names.TRAINED, cursor=self._trained_cursor, count=ADOPTED_AT_ONCE)
        )
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name, _ in page:
                pipeline.exists(key_names.session(name.decode()))
            there = await stored(pipeline.execute())
        if gone := [name for (name, _), exists in zip(page, there, strict=True) if not exists]:
            await stored(self._redis.zrem(key_names.TRAINED, *gone))  # bounded: ADOPTED_AT_ONCE

    async def _heads(self, names: Sequence[str]) -> list[Mapping[bytes, bytes]]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hgetall(key_names.session(name))
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
            await PUT_OFF.run(self._redis, SETTLED_IN, [session_id])
            return None
        if head is None:
            await stored(self._redis.zrem(key_names.SETTLED, session_id))
            return None
        verdict = await FORGET.run(self._redis, *_forgetting(head, len(fields), before))
        return None if verdict is None else verdict.decode()


def forgotten_sessions(counts: Mapping[bytes, bytes]) -> int:
    """How many sessions were forgotten, from the counters of `weir:forgotten`."""
    return sum(int(number) for name, number in counts.items() if name.startswith(b"session:"))


def _forgetting(head: SessionHead, seen: int, before: bytes) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of FORGET. `seen` is how many fields the session's hash had."""
    session_id, group_id = head.spec.session_id, head.spec.group_id or ""
    traces, numbers = traces_of(head)
    named: list[str] = [key_names.session(session_id), key_names.SETTLED, key_names.SESSIONS]
    named += [key_names.FORGOTTEN, key_names.FORGOTTEN_IDS]
    named += [key_names.group(group_id), key_names.group_members(group_id), *traces]
    arguments: list[Argument] = [session_id, seen, before, key_names.session(""), group_id]
    arguments += [IDS_KEPT, *numbers]
    for turn in head.turns:
        arguments += [turn.turn_id, len(turn.output_ids)]
    return named, arguments
