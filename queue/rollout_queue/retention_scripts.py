"""What forgetting does inside Redis: each script happens whole or not at all, and anybody may repeat it."""

from rollout_queue.redis_reader_scripts import LAST_DELIVERED
from rollout_queue.redis_scripts import LEAVE, SETTLE

DUE = (
    LAST_DELIVERED
    + """
-- KEYS: settled, stream   ARGV: group, settled for how many ms, most, prefix of session keys
-- The moment before which a session has to be settled, in ms; then of the oldest of these, id and fields.
-- What a trainer has yet to read, or to acknowledge, is of sessions that were settled later than its oldest
-- entry; both moments are of the stream's own clock, so no other clock can differ from it.
local time = redis.call('TIME')
local before = time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[2]
local function owed(id) if id then before = math.min(before, tonumber(string.match(id, '%d+')) - 1) end end
if redis.call('EXISTS', KEYS[2]) == 1 then
    local delivered = last_delivered(KEYS[2], ARGV[1])
    if delivered then owed(redis.call('XPENDING', KEYS[2], ARGV[1])[2]) end
    local unread = redis.call('XRANGE', KEYS[2], delivered and '(' .. delivered or '-', '+', 'COUNT', 1)[1]
    owed(unread and unread[1])
end
local found = {string.format('%.0f', before)}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', before, 'LIMIT', 0, ARGV[3])) do
    found[#found + 1] = id
    found[#found + 1] = redis.call('HLEN', ARGV[4] .. id)
end
return found
"""
)

FORGET = (
    LEAVE
    + """
-- KEYS: session, settled, sessions, forgotten, forgotten ids, group, members, place…, user…, response…,
--       continuation…
-- ARGV: id, seen, before, prefix of session keys, group, now, kept, how many places, users and responses,
--       (turn, tokens)…
-- `seen` is how many fields the session had when all of this was told of it.
-- Returns its verdict; nothing where somebody else has forgotten it, or it has changed since.
local session, id = KEYS[1], ARGV[1]
local function code(verdict) return verdict and string.match(verdict, '"code":%s*"([^"]*)"') end
local since, verdict = redis.call('ZSCORE', KEYS[2], id), code(redis.call('HGET', session, 'verdict'))
if not since or tonumber(since) > tonumber(ARGV[3]) or not verdict then return nil end
if redis.call('HLEN', session) ~= tonumber(ARGV[2]) then return nil end
local counts = {['session:' .. verdict] = 1}
for at = 11, #ARGV, 2 do
    local own = code(redis.call('HGET', session, 'v:' .. ARGV[at]))
    if own then counts['turn:' .. own] = (counts['turn:' .. own] or 0) + 1 end
    if own == 'trained' then counts['tokens:trained'] = (counts['tokens:trained'] or 0) + ARGV[at + 1] end
end
-- First, since it frees memory: a full Redis refuses nothing that follows.
redis.call('DEL', session)
redis.call('ZREM', KEYS[2], id)
redis.call('ZREM', KEYS[3], id)
for name, number in pairs(counts) do redis.call('HINCRBY', KEYS[4], name, number) end
redis.call('ZADD', KEYS[5], ARGV[6], 's:' .. id)
local function any_left()
    for _, member in ipairs(redis.call('SMEMBERS', KEYS[7])) do
        if redis.call('EXISTS', ARGV[4] .. member) == 1 then return true end
    end
end
if ARGV[5] ~= '' then
    if any_left() then -- the group has not become smaller: a place in it is taken once
        redis.call('HINCRBY', KEYS[6], 'forgotten', 1)
    else
        redis.call('DEL', KEYS[6], KEYS[7])
        redis.call('ZADD', KEYS[5], ARGV[6], 'g:' .. ARGV[5])
    end
end
redis.call('ZREMRANGEBYRANK', KEYS[5], 0, -1 - ARGV[7])
leave(8, ARGV[8], ARGV[9], ARGV[10])
return verdict
"""
)

ADOPT = (
    SETTLE
    + """
-- KEYS: settled, stream, session…   ARGV: id…
-- Those that have a verdict and that nobody has noted as settled are settled now.
for at = 3, #KEYS do
    local id = ARGV[at - 2]
    if redis.call('HEXISTS', KEYS[at], 'verdict') == 1 and not redis.call('ZSCORE', KEYS[1], id) then
        settle(KEYS[1], KEYS[2], id)
    end
end
"""
)
