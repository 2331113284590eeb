"""Scripts of the trainer, the one consumer of the stream: each first checks the fence.

So a process that was suspended while another one claimed the lease can neither take nor acknowledge an entry.
"""

from typing import Any

from rollout_queue.redis.lease import FencedScript
from rollout_queue.redis.lua import LAST_DELIVERED, SETTLE

CONFIRM = FencedScript[int]("return 1")

JOIN = FencedScript[None](
    LAST_DELIVERED
    + """
-- KEYS: fence, stream   ARGV: token, group
-- A full Redis refuses XGROUP CREATE as the first write of a script, even for a group that exists. It accepts
-- XACK, so that comes first.
if not last_delivered(KEYS[2], ARGV[2]) then
    redis.call('XACK', KEYS[2], ARGV[2], '0-1')
    redis.call('XGROUP', 'CREATE', KEYS[2], ARGV[2], '0', 'MKSTREAM')
end
"""
)

READ = FencedScript[list[Any] | None]("""
-- KEYS: fence, stream   ARGV: token, group, consumer, count, start
-- `start` is '>' for new entries; for pending ones, the id before the first.
local what = {'GROUP', ARGV[2], ARGV[3], 'COUNT', ARGV[4], 'STREAMS', KEYS[2], ARGV[5]}
local found = redis.call('XREADGROUP', unpack(what)) -- bounded: by the page
return found and found[1][2]
""")

DELIVERED_LAST = FencedScript[bytes | None](
    LAST_DELIVERED
    + """
-- KEYS: fence, stream   ARGV: token, group
return last_delivered(KEYS[2], ARGV[2])
"""
)

ACKNOWLEDGE = FencedScript[None](
    SETTLE
    + """
-- KEYS: fence, stream, verdicts, deadlines, settled, trained, steps, session…
-- ARGV: token, group, how many entries, how many steps, steps kept, entry…, (version, step)…, and for each
--       verdict: index of session, id, field, verdict, version that a session has trained or '', numbers of
--       a trained turn's tokens or ''
redis.call('HDEL', KEYS[3], '') -- a full Redis accepts this, and then refuses no later write
local last = 5 + tonumber(ARGV[3])
for first = 6, last, 1000 do -- `unpack` is limited by the size of Lua's stack
    -- bounded: by the page
    redis.call('XACK', KEYS[2], ARGV[2], unpack(ARGV, first, math.min(first + 999, last)))
end
local function code(verdict) return string.match(verdict, '"code":"([^"]*)"') end
local counts = {}
local function count(name, number) counts[name] = (counts[name] or 0) + number end
local verdicts = last + 2 * ARGV[4]
for at = last + 1, verdicts, 2 do -- no two steps make one version
    redis.call('ZREMRANGEBYSCORE', KEYS[7], ARGV[at], ARGV[at])
    redis.call('ZADD', KEYS[7], ARGV[at], ARGV[at + 1])
end
if verdicts > last then redis.call('ZREMRANGEBYRANK', KEYS[7], 0, -1 - ARGV[5]) end
for at = verdicts + 1, #ARGV, 6 do -- bounded: by the page
    local session, id, field, verdict = KEYS[7 + ARGV[at]], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    local version, numbers = ARGV[at + 4], ARGV[at + 5]
    local before = redis.call('HGET', session, field)
    -- Nothing is written to a deleted session. A verdict that is repeated because an answer was lost counts
    -- once.
    if before ~= verdict and (before or redis.call('EXISTS', session) == 1) then
        local kind = field == 'verdict' and 'session:' or 'turn:'
        if before then count(kind .. code(before), -1) end
        count(kind .. code(verdict), 1)
        if numbers ~= '' then
            redis.call('HSET', session, field, verdict, 'n:' .. string.sub(field, 3), numbers)
        else
            redis.call('HSET', session, field, verdict)
        end
        if field == 'verdict' then
            redis.call('ZREM', KEYS[4], id)
            settle(KEYS[5], KEYS[2], id)
            if version ~= '' then
                redis.call('ZADD', KEYS[6], version, id)
            else
                redis.call('ZREM', KEYS[6], id)
            end
        end
    end
end
for name, number in pairs(counts) do redis.call('HINCRBY', KEYS[3], name, number) end
"""
)

FREE = FencedScript[list[Any]](
    LAST_DELIVERED
    + """
-- KEYS: fence, stream   ARGV: token, group, acknowledged entry…
-- Acknowledging frees no memory. What is below the oldest unacknowledged entry goes at once, also what an
-- earlier call has left; the acknowledged entries above it go one by one. The last delivered entry stays.
-- Returns 1 if more is below the oldest unacknowledged entry, or 0; then the last delivered entry, if it is
-- acknowledged.
local last = last_delivered(KEYS[2], ARGV[2])
if not last then return {0} end
local oldest = redis.call('XPENDING', KEYS[2], ARGV[2])[2] or last
-- Only `~` has a limit. It removes whole nodes of about 100 entries; what `=` removes then is in one node.
local trimmed = redis.call('XTRIM', KEYS[2], 'MINID', '~', oldest, 'LIMIT', 1000)
local more = trimmed > 500
if not more then redis.call('XTRIM', KEYS[2], 'MINID', '=', oldest) end -- bounded: one node
for at = 3, #ARGV do -- bounded: by the page
    if ARGV[at] ~= last then redis.call('XDEL', KEYS[2], ARGV[at]) end
end
local left = not redis.call('XPENDING', KEYS[2], ARGV[2], last, last, 1)[1] and last or nil
return {more and 1 or 0, left}
"""
)

REFILL = FencedScript[int]("""
-- KEYS: fence, stream, session   ARGV: token, field…
-- Appends these records of a session again. Returns how many; none if the session has its verdict.
if redis.call('HEXISTS', KEYS[3], 'verdict') == 1 then return 0 end
local appended = 0
for at = 2, #ARGV do -- bounded: one session
    local record = redis.call('HGET', KEYS[3], ARGV[at])
    if record then
        redis.call('HSET', KEYS[3], 'e:' .. redis.call('XADD', KEYS[2], '*', 'r', record), '')
        appended = appended + 1
    end
end
return appended
""")

SET_ASIDE = FencedScript[None]("""
-- KEYS: fence, stream, dead letters   ARGV: token, group, entry, field, value, …
local pending = redis.call('XACK', KEYS[2], ARGV[2], ARGV[3]) == 1
-- An entry that was deleted in the meantime becomes no dead letter.
if pending and redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3])[1] then
    redis.call('XADD', KEYS[3], '*', unpack(ARGV, 4)) -- bounded: one entry
end
""")

REPORT = FencedScript[None]("""
-- KEYS: fence, trainer   ARGV: token, field, value, …
redis.call('HDEL', KEYS[2], '') -- a full Redis accepts this, and then refuses no later write
redis.call('HSET', KEYS[2], unpack(ARGV, 2)) -- bounded: a report
""")

RESERVE = FencedScript[int]("""
-- KEYS: fence, reserved, policies   ARGV: token, version, location
-- Returns the highest version that was registered or reserved before. The hash has the highest reservation,
-- and the locations of the last 100 that may still be registered, by their numbers.
local registered = -1
for _, version in ipairs(redis.call('HKEYS', KEYS[3])) do -- bounded: versions whose files are there
    registered = math.max(registered, tonumber(version))
end
local newest = math.max(registered, tonumber(redis.call('HGET', KEYS[2], 'version') or -1))
local asked = tonumber(ARGV[2])
if asked > newest then
    redis.call('HDEL', KEYS[2], '') -- a full Redis accepts this, and then refuses no later write
    for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do -- bounded: some 100
        local number = tonumber(name)
        if number and (number <= registered or number <= asked - 100) then
            redis.call('HDEL', KEYS[2], name)
        end
    end
    redis.call('HSET', KEYS[2], 'version', ARGV[2], 'location', ARGV[3], ARGV[2], ARGV[3])
end
return newest
""")
