"""Quotas of sessions, counted in Redis, so that all gateways together keep them.

A session is counted before it is opened, by the script that checks the quota. No caller subtracts it: when a
quota seems used up, the script looks which of the counted sessions have ended, and removes those.
"""

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from redis.asyncio import Redis

from rollout_queue.contract.records import SessionSpec
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

OPENING_S = 60.0
"""How long a session counts that does not exist yet: its gateway may be opening it."""

TAKE = """
-- KEYS: quotas…, session…
-- ARGV: now, opening_s, sweep, shut, number of quotas, (bound, field, add)…, id…, prefix of session keys
-- Returns what refuses the sessions: 0 nothing, -1 shut, else the number of a quota; and its count.
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
        local held = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
        for index = 1, #held, 2 do
            if ended(held[index], held[index + 1], field) then redis.call('ZREM', key, held[index]) end
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
    """One count that must be below `bound` for new sessions to be admitted."""

    key: str
    bound: int
    until: Literal["outcome", "verdict"]
    """With which of the two a session stops counting."""
    counts: bool = True
    """Whether new sessions are counted here, or only checked."""


class QuotaResult(NamedTuple):
    """Whether the sessions were admitted; if not, which quota refused them, and its count."""

    allowed: bool
    refusing: int | None = None
    """Index into the quotas; None if all new sessions are refused."""
    used: int = 0


class Quotas:
    """Counts sessions in all of their quotas, or in none."""

    def __init__(self, redis: Redis, sweep_every_s: float) -> None:
        self._take = redis.register_script(TAKE)
        self._sweep_every_s = sweep_every_s
        self._swept: dict[str, float] = {}
        """When a quota's ended sessions were last removed, by key; kept for the time between two polls."""

    async def take(self, specs: Sequence[SessionSpec], quotas: Sequence[Quota], *, shut: bool) -> QuotaResult:
        """Admit sessions that exist already; count new ones, or refuse them. Raises StorageUnavailable.

        `shut` refuses all new sessions.
        """
        result = await self._try(specs, quotas, sweep=False, shut=shut)
        if result.refusing is not None and self._may_sweep(quotas[result.refusing].key):
            return await self._try(specs, quotas, sweep=True, shut=shut)
        return result

    async def _try(
        self, specs: Sequence[SessionSpec], quotas: Sequence[Quota], *, sweep: bool, shut: bool
    ) -> QuotaResult:
        names = [quota.key for quota in quotas] + [keys.session(spec.session_id) for spec in specs]
        arguments: list[str | int | float] = [time.time(), OPENING_S, int(sweep), int(shut), len(quotas)]
        for quota in quotas:
            arguments += [quota.bound, quota.until, int(quota.counts)]
        arguments += [spec.session_id for spec in specs]
        arguments.append(keys.session(""))
        refusing, count = await stored(self._take(names, arguments))
        if refusing == 0:
            return QuotaResult(True)
        return QuotaResult(False, refusing - 1 if refusing > 0 else None, count)

    def _may_sweep(self, key: str) -> bool:
        """Looking at every counted session is expensive: at most once between two polls, for each quota."""
        now = time.monotonic()
        self._swept = {each: at for each, at in self._swept.items() if now - at < self._sweep_every_s}
        return self._swept.setdefault(key, now) == now
