"""The places that sessions take up, counted in Redis so that all gateways together keep a limit.

A session takes its places before it is opened, in one script with the check. Nobody gives one back: when a
limit seems reached, the script looks which of its sessions have ended, and forgets those.
"""

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from redis.asyncio import Redis

from rollout_queue.contract.records import SessionSpec
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

UNBORN_S = 60.0
"""How long a place is held for a session that is not there: its gateway may just be opening it."""

TAKE = """
-- KEYS: places…, session…
-- ARGV: now, unborn, sweep, shut, number of places, (bound, field, add)…, id…, prefix of session keys
-- Returns what stands in the way: 0 nothing, -1 shut, else the number of the places; and their count.
local places = tonumber(ARGV[5])
local first_id = 5 + 3 * places
local new = {}
for index = 1, #KEYS - places do
    local exists = redis.call('HEXISTS', KEYS[places + index], 'spec')
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
for place = 1, places do
    local key, bound, field = KEYS[place], tonumber(ARGV[3 + 3 * place]), ARGV[4 + 3 * place]
    if ARGV[3] == '1' and redis.call('ZCARD', key) >= bound then
        local held = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
        for index = 1, #held, 2 do
            if ended(held[index], held[index + 1], field) then redis.call('ZREM', key, held[index]) end
        end
    end
    local count = redis.call('ZCARD', key)
    if count >= bound then return {place, count} end
end
for place = 1, places do
    if ARGV[5 + 3 * place] == '1' then
        for _, id in ipairs(new) do redis.call('ZADD', KEYS[place], ARGV[1], id) end
    end
end
return {0, 0}
"""


class Place(NamedTuple):
    """One count that must stay below `bound` for the sessions to come in."""

    key: str
    bound: int
    until: Literal["outcome", "verdict"]
    """What ends a session's hold on its place."""
    holds: bool = True
    """Whether new sessions take a place here, or only look whether there is one."""


class Taken(NamedTuple):
    """Whether the sessions came in; if not, which place refused them, and how many hold it."""

    allowed: bool
    refusing: int | None = None
    """Index into the places; None where the door was shut to every new session."""
    held: int = 0


class Places:
    """Takes places for sessions, all or none."""

    def __init__(self, redis: Redis, sweep_every_s: float) -> None:
        self._take = redis.register_script(TAKE)
        self._sweep_every_s = sweep_every_s
        self._swept: dict[str, float] = {}
        """When the places were last swept, by key; what is older than a poll is forgotten."""

    async def take(self, specs: Sequence[SessionSpec], places: Sequence[Place], *, shut: bool) -> Taken:
        """Sessions that exist already are in; `shut` refuses the others. Raises StorageUnavailable."""
        taken = await self._try(specs, places, sweep=False, shut=shut)
        if taken.refusing is not None and self._may_sweep(places[taken.refusing].key):
            return await self._try(specs, places, sweep=True, shut=shut)
        return taken

    async def _try(
        self, specs: Sequence[SessionSpec], places: Sequence[Place], *, sweep: bool, shut: bool
    ) -> Taken:
        names = [place.key for place in places] + [keys.session(spec.session_id) for spec in specs]
        arguments: list[str | int | float] = [time.time(), UNBORN_S, int(sweep), int(shut), len(places)]
        for place in places:
            arguments += [place.bound, place.until, int(place.holds)]
        arguments += [spec.session_id for spec in specs]
        arguments.append(keys.session(""))
        refusing, count = await stored(self._take(names, arguments))
        if refusing == 0:
            return Taken(True)
        return Taken(False, refusing - 1 if refusing > 0 else None, count)

    def _may_sweep(self, key: str) -> bool:
        """To look at every session that holds a place costs: once a poll, however many knock at the door."""
        now = time.monotonic()
        self._swept = {each: at for each, at in self._swept.items() if now - at < self._sweep_every_s}
        return self._swept.setdefault(key, now) == now
