"""Limits the number of sessions. Redis counts them, so that all gateways together keep the limits.

The script that checks a quota also counts the new session, before it is opened. A session that a client ends
is subtracted at once. Those that end otherwise are found when a quota seems used up: then the counted ones
are looked at, page by page, and those that have ended are removed.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.records import SessionSpec
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

OPENING_S = 60.0
"""A counted session that is not stored counts for this long, because its gateway may still be opening it."""

TAKE = """
-- KEYS: quotas…, session…
-- ARGV: now, shut, number of quotas, (bound, add)…, id…
-- Returns {result, count}. result: 0 if the sessions are admitted, -1 if `shut` refuses them, else the number
-- of the quota that refuses them; count: how many sessions that quota counts.
local quotas = tonumber(ARGV[3])
local first_id = 3 + 2 * quotas
local new = {}
-- bounded: the sessions of one request
for index = 1, #KEYS - quotas do
    local exists = redis.call('HEXISTS', KEYS[quotas + index], 'spec')
    if exists == 0 then new[#new + 1] = ARGV[first_id + index] end
end
if #new == 0 then return {0, 0} end
if ARGV[2] == '1' then return {-1, 0} end
for quota = 1, quotas do
    local count = redis.call('ZCARD', KEYS[quota])
    if count >= tonumber(ARGV[2 + 2 * quota]) then return {quota, count} end
end
for quota = 1, quotas do
    if ARGV[3 + 2 * quota] == '1' then
        for _, id in ipairs(new) do redis.call('ZADD', KEYS[quota], ARGV[1], id) end
    end
end
return {0, 0}
"""
SWEEP = """
-- KEYS: quota   ARGV: now, opening_s, field, first, count, prefix of session keys
-- Looks at `count` sessions of the quota from the place `first` on, and removes those that have ended: those
-- with `field` or a verdict. Returns how many it has looked at, and how many it has removed.
-- bounded: one page
local counted = redis.call('ZRANGE', KEYS[1], ARGV[4], ARGV[4] + ARGV[5] - 1, 'WITHSCORES')
local removed = 0
for index = 1, #counted, 2 do
    local session = ARGV[6] .. counted[index]
    local spec, ending, verdict = unpack(redis.call('HMGET', session, 'spec', ARGV[3], 'verdict'))
    local ended = ending or verdict
    if not spec then ended = ARGV[1] - counted[index + 1] > tonumber(ARGV[2]) end
    if ended then removed = removed + redis.call('ZREM', KEYS[1], counted[index]) end
end
return {#counted / 2, removed}
"""
PAGE, MOST_PAGES = 500, 8
"""How many sessions one script looks at, in 2 ms of Redis; and how many scripts one sweep runs. The next one
goes on where it ended."""


class Quota(NamedTuple):
    """A sorted set of counted sessions. New sessions are admitted while it has fewer than `bound` members."""

    key: str
    bound: int
    until: Literal["outcome", "verdict"]
    """`outcome`: a session counts until it has an outcome or a verdict; `verdict`: until it has a verdict."""
    counts: bool = True
    """Whether admitted sessions are added to the set. If false, the quota is only checked."""


class QuotaResult(NamedTuple):
    """Whether the sessions were admitted; if not, which quota refused them."""

    allowed: bool
    refusing: int | None = None
    """The index of the quota; None if the sessions were admitted, or if `shut` refused them."""
    used: int = 0
    """How many sessions that quota counts."""


class Quotas:
    """Counts new sessions in all quotas that apply to them, or in none if one is used up."""

    def __init__(self, redis: Redis, sweep_every_s: float) -> None:
        self._redis = redis
        self._take, self._sweep = redis.register_script(TAKE), redis.register_script(SWEEP)
        self._sweep_every_s = sweep_every_s
        self._swept: dict[str, float] = {}
        """By key, when a quota's ended sessions were last removed; dropped after `sweep_every_s`."""
        self._places: dict[str, int] = {}
        """By key, where the last sweep has ended; missing for the beginning."""

    async def take(self, specs: Sequence[SessionSpec], quotas: Sequence[Quota], *, shut: bool) -> QuotaResult:
        """Admit sessions that exist already. Count all the new ones, or refuse them all.

        With `shut`, new sessions are refused whatever the counts are. Raises StorageUnavailable.
        """
        result = await self._try(specs, quotas, shut=shut)
        for _ in quotas:
            if result.refusing is None or not self._may_sweep(quotas[result.refusing].key):
                break
            await self._remove_ended(quotas[result.refusing])
            result = await self._try(specs, quotas, shut=shut)
        return result

    async def ended(self, session_id: str, *counted_in: str) -> None:
        """The session counts in these quotas no more. Raises StorageUnavailable."""
        for key in counted_in:
            await stored(self._redis.zrem(key, session_id))

    async def _remove_ended(self, quota: Quota) -> None:
        """Remove the ended sessions of the next pages."""
        place = start = self._places.pop(quota.key, 0)
        for _ in range(MOST_PAGES):
            arguments = [clock.now(), OPENING_S, quota.until, place, PAGE, keys.session("")]
            seen, removed = await stored(self._sweep([quota.key], arguments))
            place = place + seen - removed
            if seen < PAGE:  # the end
                place = 0
                if start == 0:
                    return
        self._places[quota.key] = place

    async def _try(self, specs: Sequence[SessionSpec], quotas: Sequence[Quota], *, shut: bool) -> QuotaResult:
        names = [quota.key for quota in quotas] + [keys.session(spec.session_id) for spec in specs]
        arguments: list[str | int | float] = [clock.now(), int(shut), len(quotas)]
        for quota in quotas:
            arguments += [quota.bound, int(quota.counts)]
        arguments += [spec.session_id for spec in specs]
        refusing, count = await stored(self._take(names, arguments))
        if refusing == 0:
            return QuotaResult(True)
        return QuotaResult(False, refusing - 1 if refusing > 0 else None, count)

    def _may_sweep(self, key: str) -> bool:
        """Whether the quota's ended sessions may be removed now, and note that they are: each quota waits
        `sweep_every_s` in between."""
        now = clock.monotonic()
        self._swept = {each: at for each, at in self._swept.items() if now - at < self._sweep_every_s}
        return self._swept.setdefault(key, now) == now
