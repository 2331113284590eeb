"""Scripts that forget sessions. Each may be repeated by any gateway."""

from rollout_queue.redis.scripts.functions import LAST_DELIVERED, REMOVE_REFERENCES, SETTLE

DUE = (
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

FORGET = (
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

PUT_OFF = (
    SETTLE
    + """
-- KEYS: settled, stream   ARGV: id
-- Treats the session as settled now, so that it is looked at again later.
redis.call('ZREM', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then settle(KEYS[1], KEYS[2], ARGV[1]) end
"""
)

ADOPT = (
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
