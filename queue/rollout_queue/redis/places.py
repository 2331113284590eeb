"""Where a session stands in the list of all: by creation, then by id; it stays there when others go."""

from typing import NamedTuple

from redis.asyncio import Redis

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.tombstone import Tombstone
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

AFTER = """
-- KEYS: sessions   ARGV: created, id, most
-- Up to so many sessions behind that place, whether or not anything stands there, each with its time.
local most, created, id = tonumber(ARGV[3]), tonumber(ARGV[1]), ARGV[2]
local function behind(name) -- as sorted sets compare, which is not as Lua does under every locale
    for at = 1, math.min(#name, #id) do
        local one, other = string.byte(name, at), string.byte(id, at)
        if one ~= other then return one > other end
    end
    return #name > #id
end
local found, offset = {}, 0
repeat
    local page = redis.call(
        'ZRANGEBYSCORE', KEYS[1], ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', offset, most)
    for at = 1, #page, 2 do
        local later = tonumber(page[at + 1]) > created or behind(page[at])
        if later and #found < 2 * most then
            found[#found + 1] = page[at]
            found[#found + 1] = page[at + 1]
        end
    end
    offset = offset + most
until #page < 2 * most or #found == 2 * most
return found
"""


class Place(NamedTuple):
    """Of one session, also when that is gone."""

    created_at: float
    session_id: str


START = Place(float("-inf"), "")


class Listed(NamedTuple):
    """What is at a place: None where the session went just now."""

    place: Place
    found: SessionHead | Tombstone | None


async def places_after(redis: Redis, place: Place, most: int) -> list[Place]:
    """The next sessions behind `place`, oldest first. Raises StorageUnavailable."""
    script = redis.register_script(AFTER)
    found: list[bytes] = await stored(script([keys.SESSIONS], [*place, most]))
    return [Place(float(at), name.decode()) for name, at in zip(found[::2], found[1::2], strict=True)]
