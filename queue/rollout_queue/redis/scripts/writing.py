"""What the gateways' end does inside Redis: each script happens whole or not at all.

A full Redis refuses the first write of a script and then no other, so nothing stays half done. An append
may be repeated by whoever missed its answer.
"""

SETTLE = """
local settled_at
local function settle(settled, stream, id)
    -- The moment, in ms, that no entry of the session lies behind, whatever Redis' clock does.
    if not settled_at then
        local time = redis.call('TIME')
        local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
        settled_at = time[1] * 1000 + math.floor(time[2] / 1000)
        if newest then settled_at = math.max(settled_at, tonumber(string.match(newest[1], '%d+'))) end
    end
    redis.call('ZADD', settled, settled_at, id)
end
"""

LEAVE = """
local function leave(first, places, users, responses)
    -- What is known of the session elsewhere, by KEYS from `first` on.
    places = first - 1 + places
    users, responses = places + users, places + users + responses
    for at = first, places do redis.call('ZREM', KEYS[at], ARGV[1]) end
    for at = places + 1, users do redis.call('SREM', KEYS[at], ARGV[1]) end
    for at = users + 1, responses do redis.call('DEL', KEYS[at]) end
    for at = responses + 1, #KEYS do -- another session may have answered the same since
        if redis.call('GET', KEYS[at]) == ARGV[1] then redis.call('DEL', KEYS[at]) end
    end
end
"""

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
redis.call('HSET', KEYS[1], 'size', ARGV[1], 'owner', ARGV[2])
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

APPEND_TURN = """
-- KEYS: session, stream, deadlines, sessions, deleted, deleted users, forgotten ids, user…, continuation…
-- ARGV: id, field, turn, expires, ttl in ms, request, seen, spec, created, number of users, digest of user…
-- `spec` opens a session that is not there yet; empty where it has to be.
-- `request` names a field that is there once a retry of the turn's request was recorded. `seen` is how many
-- fields the session had when the turn's relation to other attempts was told; empty where nobody looked.
local known = redis.call('HMGET', KEYS[1], ARGV[2], 'spec', 'outcome', ARGV[6])
local stored, spec, outcome, retried = unpack(known)
local before = redis.call('HLEN', KEYS[1])
if stored then return {before, before} end
if not spec then
    if redis.call('HEXISTS', KEYS[5], ARGV[1]) == 1 then return 'deleted' end
    if ARGV[8] == '' then return 'unknown' end
    if redis.call('ZSCORE', KEYS[7], 's:' .. ARGV[1]) then return 'forgotten' end
end
if outcome then return 'closed' end
local users = tonumber(ARGV[10])
for user = 1, users do
    if redis.call('SISMEMBER', KEYS[6], ARGV[10 + user]) == 1 then return 'user deleted' end
end
local looked = ARGV[7] ~= ''
if looked and before ~= tonumber(ARGV[7]) then return 'retried' end
if retried and not looked then return 'retried' end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[3])
if not spec then
    redis.call('HSET', KEYS[1], 'spec', ARGV[8])
    redis.call('ZADD', KEYS[4], ARGV[9], ARGV[1])
end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
if looked then redis.call('HSET', KEYS[1], ARGV[6], '') end
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
for user = 1, users do redis.call('SADD', KEYS[7 + user], ARGV[1]) end
for continuation = 8 + users, #KEYS do redis.call('SET', KEYS[continuation], ARGV[1], 'PX', ARGV[5]) end
return {before, redis.call('HLEN', KEYS[1])}
"""

APPEND_REWARD = """
-- KEYS: session, stream, deleted   ARGV: id, field, reward, late reward
-- Returns the reward that is stored; in a list, why there is none.
local stored, verdict, spec = unpack(redis.call('HMGET', KEYS[1], ARGV[2], 'verdict', 'spec'))
if not spec then return {redis.call('HEXISTS', KEYS[3], ARGV[1]) == 1 and 'deleted' or 'unknown'} end
if stored then return stored end
local reward = ARGV[3]
if verdict then reward = ARGV[4]
else redis.call('XADD', KEYS[2], '*', 'r', reward) end
redis.call('HSET', KEYS[1], ARGV[2], reward)
return reward
"""

APPEND_OUTCOME = (
    SETTLE
    + """
-- KEYS: session, stream, deadlines, verdicts, deleted, settled
-- ARGV: id, outcome, reward field, reward, verdict, verdict code
-- Returns the outcome that is stored; in a list, why there is none.
local stored, spec = unpack(redis.call('HMGET', KEYS[1], 'outcome', 'spec'))
if not spec then return {redis.call('HEXISTS', KEYS[5], ARGV[1]) == 1 and 'deleted' or 'unknown'} end
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
    settle(KEYS[6], KEYS[2], ARGV[1])
end
return ARGV[2]
"""
)

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
        if string.sub(field, 1, 2) == 'r:' then return 0 end -- rewarded: it waits for the trainer alone
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

HEARTBEAT = """
-- KEYS: session, deadlines   ARGV: id, now, expires
local spec, outcome, verdict = unpack(redis.call('HMGET', KEYS[1], 'spec', 'outcome', 'verdict'))
if not spec or outcome or verdict then return 0 end
redis.call('HSET', KEYS[1], 'beat', ARGV[2])
redis.call('ZADD', KEYS[2], 'GT', ARGV[3], ARGV[1])
return 1
"""

DELETE = (
    LEAVE
    + """
-- KEYS: session, stream, verdicts, deleted, deleting, place…, user…, response…, continuation…
-- ARGV: id, seen, tombstone, deletion, now, how many places, users and responses
-- `seen` is how many fields the session had when its tombstone was written.
if redis.call('HEXISTS', KEYS[4], ARGV[1]) == 1 then return 'deleted' end
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[2]) then return 'changed' end
local verdict = redis.call('HGET', KEYS[1], 'verdict')
-- First, since it frees memory: a full Redis refuses nothing that follows.
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[4], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[5], ARGV[5], ARGV[1])
redis.call('XADD', KEYS[2], '*', 'r', ARGV[4])
redis.call('HINCRBY', KEYS[3], 'session:deleted', 1)
local code = verdict and string.match(verdict, '"code":"([^"]*)"')
if code then redis.call('HINCRBY', KEYS[3], 'session:' .. code, -1) end
leave(6, ARGV[6], ARGV[7], ARGV[8])
return 'done'
"""
)

SCRUB = r"""
-- KEYS: stream   ARGV: first, count, schema, session id as MessagePack…
-- Removes from `count` entries the records of these sessions, but not those of their deletion. Returns the
-- last entry that it looked at; nothing at the stream's end.
-- A record of this schema says its session before anything that somebody else gave. Of bytes that no build
-- of ours can read, it is enough that they name the id as a session; or hold it, if it is no short one.
local sessions = {}
for at = 4, #ARGV do sessions[ARGV[at]] = true end
local function named(record)
    local _, at = string.find(record, '\170session_id', 1, true)
    if not at then return nil end
    local head, size = string.byte(record, at + 1, at + 2)
    if head == 217 then return string.sub(record, at + 1, at + 2 + (size or 0)) end
    return string.sub(record, at + 1, at + 1 + (head or 160) - 160)
end
local function holds(bytes)
    local key = string.find(bytes, '\170session_id', 1, true) and '\170session_id' or ''
    for at = 4, #ARGV do
        local telling = key ~= '' or #ARGV[at] > 16
        if telling and string.find(bytes, key .. ARGV[at], 1, true) then return true end
    end
end
local function of_these(fields)
    local record = fields[1] == 'r' and fields[2] or table.concat(fields, ' ')
    local session = string.sub(record, 1, 1) == ARGV[3] and named(record)
    if not session then return holds(record) end
    return sessions[session] and string.sub(record, 3, 16) ~= '\164type\168deletion'
end
local entries = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])
for _, entry in ipairs(entries) do
    if of_these(entry[2]) then redis.call('XDEL', KEYS[1], entry[1]) end
end
return #entries == tonumber(ARGV[2]) and entries[#entries][1]
"""
