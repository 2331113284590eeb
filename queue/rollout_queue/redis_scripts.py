"""What the gateways' end does inside Redis: each script happens whole or not at all.

A full Redis refuses the first write of a script and then no other, so nothing stays half done. An append
may be repeated by whoever missed its answer.
"""

OPEN = """
-- KEYS: session, sessions, deadlines [, group, members]   ARGV: id, spec, created, expires, owner, size
local spec = redis.call('HGET', KEYS[1], 'spec')
if spec then return {'exists', spec} end
if KEYS[4] then
    local size, owner = unpack(redis.call('HMGET', KEYS[4], 'size', 'owner'))
    if owner and owner ~= ARGV[5] then return {'owner'} end
    if not size or size == '' then size = ARGV[6] end
    if ARGV[6] ~= '' and size ~= ARGV[6] then return {'size', size} end
    if size ~= '' and redis.call('SCARD', KEYS[5]) >= tonumber(size) then return {'full', size} end
    redis.call('HSET', KEYS[4], 'size', size, 'owner', ARGV[5])
    redis.call('SADD', KEYS[5], ARGV[1])
end
redis.call('HSET', KEYS[1], 'spec', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
return {'created'}
"""

OPEN_GROUP = """
-- KEYS: group, members, sessions, deadlines, session…   ARGV: size, owner, created, expires, (id, spec)…
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'size', ARGV[1], 'owner', ARGV[2])
for member = 5, #KEYS do
    local id, spec = ARGV[2 * member - 5], ARGV[2 * member - 4]
    redis.call('SADD', KEYS[2], id)
    redis.call('ZADD', KEYS[3], ARGV[3], id)
    redis.call('ZADD', KEYS[4], ARGV[4], id)
    redis.call('HSET', KEYS[member], 'spec', spec)
end
return 1
"""

APPEND_TURN = """
-- KEYS: session, stream, deadlines [, continuation]   ARGV: id, field, turn, expires, ttl in ms
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then return 'stored' end
if redis.call('HEXISTS', KEYS[1], 'spec') == 0 then return 'unknown' end
if redis.call('HEXISTS', KEYS[1], 'outcome') == 1 then return 'closed' end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[3])
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
if KEYS[4] then redis.call('SET', KEYS[4], ARGV[1], 'PX', ARGV[5]) end
return 'stored'
"""

APPEND_REWARD = """
-- KEYS: session, stream   ARGV: field, reward, late reward
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored then return stored end
local reward = ARGV[2]
if redis.call('HEXISTS', KEYS[1], 'verdict') == 1 then reward = ARGV[3]
else redis.call('XADD', KEYS[2], '*', 'r', reward) end
redis.call('HSET', KEYS[1], ARGV[1], reward)
return reward
"""

APPEND_OUTCOME = """
-- KEYS: session, stream, deadlines, verdicts   ARGV: id, outcome, reward field, reward, verdict, verdict code
local stored = redis.call('HGET', KEYS[1], 'outcome')
if stored then return stored end
if ARGV[3] ~= '' and redis.call('HEXISTS', KEYS[1], ARGV[3]) == 0 then
    redis.call('XADD', KEYS[2], '*', 'r', ARGV[4])
    redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
redis.call('HSET', KEYS[1], 'outcome', ARGV[2])
if ARGV[5] ~= '' then
    redis.call('HSET', KEYS[1], 'verdict', ARGV[5])
    redis.call('HINCRBY', KEYS[4], 'session:' .. ARGV[6], 1)
    redis.call('ZREM', KEYS[3], ARGV[1])
end
return ARGV[2]
"""

EXPIRE = """
-- KEYS: session, stream, deadlines, verdicts   ARGV: id, outcome, verdict, now
local deadline = redis.call('ZSCORE', KEYS[3], ARGV[1])
if not deadline or tonumber(deadline) > tonumber(ARGV[4]) then return 0 end
redis.call('ZREM', KEYS[3], ARGV[1])
if redis.call('HEXISTS', KEYS[1], 'verdict') == 1 then return 0 end
if redis.call('HEXISTS', KEYS[1], 'outcome') == 1 then
    for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
        if string.sub(field, 1, 2) == 'r:' then return 0 end -- rewarded: it waits for the trainer alone
    end
end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
redis.call('HSETNX', KEYS[1], 'outcome', ARGV[2])
redis.call('HSET', KEYS[1], 'verdict', ARGV[3])
redis.call('HINCRBY', KEYS[4], 'session:expired', 1)
return 1
"""
