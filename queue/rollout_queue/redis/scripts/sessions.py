"""Scripts that open, list, keep open and expire sessions."""

from rollout_queue.redis.scripts.functions import SETTLE

OPEN = """
-- KEYS: session, sessions, deadlines, deleted, deleted users, user, forgotten ids [, group, members]
-- ARGV: id, spec, created, expires, owner, size, digest of the user, group
local spec = redis.call('HGET', KEYS[1], 'spec')
if spec then return {'exists', spec} end
if redis.call('HEXISTS', KEYS[4], ARGV[1]) == 1 then return {'deleted'} end
local user = ARGV[7] ~= ''
if user and redis.call('SISMEMBER', KEYS[5], ARGV[7]) == 1 then return {'user deleted'} end
if redis.call('ZSCORE', KEYS[7], 's:' .. ARGV[1]) then return {'forgotten'} end
if KEYS[8] then
    local size, owner = unpack(redis.call('HMGET', KEYS[8], 'size', 'owner'))
    if not owner and redis.call('ZSCORE', KEYS[7], 'g:' .. ARGV[8]) then return {'group forgotten'} end
    if owner and owner ~= ARGV[5] then return {'owner'} end
    if not size or size == '' then size = ARGV[6] end
    if ARGV[6] ~= '' and size ~= ARGV[6] then return {'size', size} end
    if size ~= '' and redis.call('SCARD', KEYS[9]) >= tonumber(size) then return {'full', size} end
    redis.call('HSET', KEYS[8], 'size', size, 'owner', ARGV[5])
    redis.call('HSETNX', KEYS[8], 'opened_at', ARGV[3])
    redis.call('SADD', KEYS[9], ARGV[1])
end
redis.call('HSET', KEYS[1], 'spec', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
if user then redis.call('SADD', KEYS[6], ARGV[1]) end
return {'created'}
"""

OPEN_GROUP = """
-- KEYS: group, members, sessions, deadlines, deleted users, user, forgotten ids, session…
-- ARGV: size, owner, created, expires, digest of the user, group, (id, spec)…
if redis.call('EXISTS', KEYS[1]) == 1 then return 'exists' end
if redis.call('ZSCORE', KEYS[7], 'g:' .. ARGV[6]) then return 'forgotten' end
local user = ARGV[5] ~= ''
if user and redis.call('SISMEMBER', KEYS[5], ARGV[5]) == 1 then return 'user deleted' end
redis.call('HSET', KEYS[1], 'size', ARGV[1], 'owner', ARGV[2], 'opened_at', ARGV[3])
for member = 8, #KEYS do
    local id, spec = ARGV[2 * member - 9], ARGV[2 * member - 8]
    redis.call('SADD', KEYS[2], id)
    redis.call('ZADD', KEYS[3], ARGV[3], id)
    redis.call('ZADD', KEYS[4], ARGV[4], id)
    redis.call('HSET', KEYS[member], 'spec', spec)
    if user then redis.call('SADD', KEYS[6], id) end
end
return 'created'
"""

EXPIRE = (
    SETTLE
    + """
-- KEYS: session, stream, deadlines, verdicts, settled   ARGV: id, outcome, verdict, now
local deadline = redis.call('ZSCORE', KEYS[3], ARGV[1])
if not deadline or tonumber(deadline) > tonumber(ARGV[4]) then return 0 end
redis.call('ZREM', KEYS[3], ARGV[1])
if redis.call('HEXISTS', KEYS[1], 'verdict') == 1 then return 0 end
if redis.call('HEXISTS', KEYS[1], 'outcome') == 1 then
    for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
        if string.sub(field, 1, 2) == 'r:' then return 0 end -- rewarded: only the trainer has to act
    end
end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
redis.call('HSETNX', KEYS[1], 'outcome', ARGV[2])
redis.call('HSET', KEYS[1], 'verdict', ARGV[3])
redis.call('HINCRBY', KEYS[4], 'session:expired', 1)
settle(KEYS[5], KEYS[2], ARGV[1])
return 1
"""
)

PUT_OFF = """
-- KEYS: deadlines   ARGV: id, deadline
redis.call('ZREM', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
redis.call('ZADD', KEYS[1], 'XX', ARGV[2], ARGV[1])
"""

HEARTBEAT = """
-- KEYS: session, deadlines   ARGV: id, now, expires
local spec, outcome, verdict = unpack(redis.call('HMGET', KEYS[1], 'spec', 'outcome', 'verdict'))
if not spec or outcome or verdict then return 0 end
redis.call('HSET', KEYS[1], 'beat', ARGV[2])
redis.call('ZADD', KEYS[2], 'GT', ARGV[3], ARGV[1])
return 1
"""

LIST_AFTER = """
-- KEYS: sessions   ARGV: created, id, count
-- Returns up to `count` sessions after that position, each with its creation time.
local most, created, id = tonumber(ARGV[3]), tonumber(ARGV[1]), ARGV[2]
local function behind(name) -- compares bytes as sorted sets do; Lua's own comparison depends on the locale
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

PROGRESS = """
-- KEYS: session…   Returns of each: spec, outcome, whether it has a verdict, whether it has a reward
local found = {}
for _, session in ipairs(KEYS) do
    local spec, outcome, verdict = unpack(redis.call('HMGET', session, 'spec', 'outcome', 'verdict'))
    local rewarded = 0
    if outcome and not verdict then
        for _, field in ipairs(redis.call('HKEYS', session)) do
            if string.sub(field, 1, 2) == 'r:' then rewarded = 1 break end
        end
    end
    found[#found + 1] = {spec or '', outcome or '', verdict and 1 or 0, rewarded}
end
return found
"""
