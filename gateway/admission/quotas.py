"""Limits the number of sessions. Redis counts them, so that all gateways together keep the limits.

The script that checks a quota also counts the new session, before it is opened. Nothing subtracts a session
when it ends. Only when a quota seems used up does the script remove the counted sessions that have ended.
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
-- ARGV: now, opening_s, sweep, shut, number of quotas, (bound, field, add)…, id…, prefix of session keys
-- sweep: first remove the sessions that have ended, those with `field` or a verdict, from full quotas.
-- Returns {result, count}. result: 0 if the sessions are admitted, -1 if `shut` refuses them, else the number
-- of the quota that refuses them; count: how many sessions that quota counts.
local quotas = tonumber(ARGV[5])
local first_id = 5 + 3 * quotas
local new = {}
for index = 1, #KEYS - quotas do
    local exists = redis.call('HEXISTS', KEYS[quotas + index], 'spec')
    if exists == 0 then new[#new + 1] = ARGV[first_id + index] end
end
if #new == 0 then return {0, 0} end
if ARGV[4] == '1' then return {-1, 0} end
local function ended(id, since, field)
    local session = ARGV[#ARGV] .. id
    local spec, ending, verdict = unpack(redis.call('HMGET', session, 'spec', field, 'verdict'))
    if not spec then return ARGV[1] - since > tonumber(ARGV[2]) end
    return ending or verdict
end
for quota = 1, quotas do
    local key, bound, field = KEYS[quota], tonumber(ARGV[3 + 3 * quota]), ARGV[4 + 3 * quota]
    if ARGV[3] == '1' and redis.call('ZCARD', key) >= bound then
        local counted = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
        for index = 1, #counted, 2 do
            local id, since = counted[index], counted[index + 1]
            if ended(id, since, field) then redis.call('ZREM', key, id) end
        end
    end
    local count = redis.call('ZCARD', key)
    if count >= bound then return {quota, count} end
end
for quota = 1, quotas do
    if ARGV[5 + 3 * quota] == '1' then
        for _, id in ipairs(new) do redis.call('ZADD', KEYS[quota], ARGV[1], id) end
    end
end
return {0, 0}
"""


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
        self._take = redis.register_script(TAKE)
        self._sweep_every_s = sweep_every_s
        self._swept: dict[str, float] = {}
        """By key, when a quota's ended sessions were last removed; dropped after `sweep_every_s`."""

    async def take(self, specs: Sequence[SessionSpec], quotas: Sequence[Quota], *, shut: bool) -> QuotaResult:
        """Admit sessions that exist already. Count all the new ones, or refuse them all.

        With `shut`, new sessions are refused whatever the counts are. Raises StorageUnavailable.
        """
        result = await self._try(specs, quotas, sweep=False, shut=shut)
        if result.refusing is not None and self._may_sweep(quotas[result.refusing].key):
            return await self._try(specs, quotas, sweep=True, shut=shut)
        return result

    async def _try(
        self, specs: Sequence[SessionSpec], quotas: Sequence[Quota], *, sweep: bool, shut: bool
    ) -> QuotaResult:
        names = [quota.key for quota in quotas] + [keys.session(spec.session_id) for spec in specs]
        arguments: list[str | int | float] = [clock.now(), OPENING_S, int(sweep), int(shut), len(quotas)]
        for quota in quotas:
            arguments += [quota.bound, quota.until, int(quota.counts)]
        arguments += [spec.session_id for spec in specs]
        arguments.append(keys.session(""))
        refusing, count = await stored(self._take(names, arguments))
        if refusing == 0:
            return QuotaResult(True)
        return QuotaResult(False, refusing - 1 if refusing > 0 else None, count)

    def _may_sweep(self, key: str) -> bool:
        """Whether the quota's ended sessions may be removed now, and note that they are.

        The script reads every counted session for that, so each quota waits `sweep_every_s` in between.
        """
        now = clock.monotonic()
        self._swept = {each: at for each, at in self._swept.items() if now - at < self._sweep_every_s}
        return self._swept.setdefault(key, now) == now
