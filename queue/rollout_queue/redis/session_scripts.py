"""Scripts that open, list, keep open and expire sessions."""

from typing import Any

from rollout_queue.redis.lua import MAY_EXPIRE, SETTLE, Script

WHY_NO_GROUP = """
local function why_no_group(first, forgotten, owner, name)
    -- Why this owner cannot have the group, whose owner is `first`; nothing if it can.
    if first and first ~= owner then return 'owner' end
    if first or not redis.call('ZSCORE', forgotten, 'g:' .. name) then return nil end
    local own = owner == '' or redis.call('ZSCORE', forgotten, 'o:' .. owner .. ':' .. name)
    return own and 'group forgotten' or 'owner'
end
"""

JOIN_GROUP = (
    WHY_NO_GROUP
    + """
local function join_group(group, members, forgotten, id, now, owner, size, name)
    -- Adds the session to the group, unless it is in it. Returns why it cannot, or nothing.
    if redis.call('SISMEMBER', members, id) == 1 then return end
    local known, first = unpack(redis.call('HMGET', group, 'size', 'owner'))
    local refusal = why_no_group(first, forgotten, owner, name)
    if refusal then return {refusal} end
    if not known or known == '' then known = size end
    if size ~= '' and known ~= size then return {'size', known} end
    if known ~= '' and redis.call('SCARD', members) >= tonumber(known) then return {'full', known} end
    redis.call('HSET', group, 'size', known, 'owner', owner)
    redis.call('HSETNX', group, 'opened_at', now)
    redis.call('SADD', members, id)
end
"""
)

OPEN = Script[list[bytes]](
    JOIN_GROUP
    + """
-- KEYS: session, sessions, deadlines, deleted, deleted users, user, forgotten ids [, group, members]
-- ARGV: id, spec, created, expires, owner, size, digest of the user, group
local spec = redis.call('HGET', KEYS[1], 'spec')
if spec then return {'exists', spec} end
if redis.call('HEXISTS', KEYS[4], ARGV[1]) == 1 then return {'deleted'} end
local user = ARGV[7] ~= ''
if user and redis.call('SISMEMBER', KEYS[5], ARGV[7]) == 1 then return {'user deleted'} end
if redis.call('ZSCORE', KEYS[7], 's:' .. ARGV[1]) then return {'forgotten'} end
local refusal = KEYS[8]
    and join_group(KEYS[8], KEYS[9], KEYS[7], ARGV[1], ARGV[3], ARGV[5], ARGV[6], ARGV[8])
if refusal then return refusal end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
if user then redis.call('SADD', KEYS[6], ARGV[1]) end
-- The spec comes last: if another program's value under one of the keys ends the script, it is repeated.
redis.call('HSET', KEYS[1], 'spec', ARGV[2])
return {'created'}
"""
)

DESCRIBE = Script[list[bytes]](
    JOIN_GROUP
    + """
-- KEYS: session, stream, deadlines, deleted users, user, forgotten ids, untrained [, group, members]
-- ARGV: id, seen, spec, now, time to live, owner, size, digest of the user, group, terms, late join,
--       count: 1, -1 or 0
-- `seen` is the stored spec that the caller has read. The new fields of the session tell that it has changed:
-- by their number, to gateways that hold its head; by `ttl` and `terms`, to calls and ends under way.
local id, now, ttl = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5])
local spec, outcome, verdict = unpack(redis.call('HMGET', KEYS[1], 'spec', 'outcome', 'verdict'))
if spec ~= ARGV[2] then return {'changed'} end
local deadline = tonumber(redis.call('ZSCORE', KEYS[3], id) or '')
if outcome or verdict or not deadline or deadline <= now then return {'ended'} end
local user = ARGV[8] ~= ''
if user and redis.call('SISMEMBER', KEYS[4], ARGV[8]) == 1 then return {'user deleted'} end
local refusal = KEYS[8]
    and join_group(KEYS[8], KEYS[9], KEYS[6], id, ARGV[4], ARGV[6], ARGV[7], ARGV[9])
if refusal then return refusal end
-- Calls in flight rely on the deadline, so it does not become earlier, even if the time to live is shorter.
local beat = math.max(now, deadline - ttl)
redis.call('HSET', KEYS[1], 'spec', ARGV[3], 'beat', string.format('%.17g', beat), 'ttl', ARGV[5],
    'terms', ARGV[10])
redis.call('ZADD', KEYS[3], string.format('%.17g', beat + ttl), id)
if user then redis.call('SADD', KEYS[5], id) end
if ARGV[11] ~= '' then
    local entry = redis.call('XADD', KEYS[2], '*', 'r', ARGV[11])
    redis.call('HSET', KEYS[1], 'joined', ARGV[11], 'e:' .. entry, '')
end
if ARGV[12] == '1' then redis.call('ZADD', KEYS[7], 'NX', ARGV[4], id) end
if ARGV[12] == '-1' then redis.call('ZREM', KEYS[7], id) end
return {'described'}
"""
)

OPEN_GROUP = Script[bytes](
    WHY_NO_GROUP
    + """
-- KEYS: group, members, sessions, deadlines, deleted users, user, forgotten ids, session…
-- ARGV: size, owner, created, expires, digest of the user, group, (id, spec)…
local first = redis.call('HGET', KEYS[1], 'owner')
local refusal = why_no_group(first, KEYS[7], ARGV[2], ARGV[6])
if refusal then return refusal end
if first then return 'exists' end
local user = ARGV[5] ~= ''
if user and redis.call('SISMEMBER', KEYS[5], ARGV[5]) == 1 then return 'user deleted' end
redis.call('HSET', KEYS[1], 'size', ARGV[1], 'owner', ARGV[2], 'opened_at', ARGV[3])
for member = 8, #KEYS do -- bounded: the group's size
    local id, spec = ARGV[2 * member - 9], ARGV[2 * member - 8]
    redis.call('SADD', KEYS[2], id)
    redis.call('ZADD', KEYS[3], ARGV[3], id)
    redis.call('ZADD', KEYS[4], ARGV[4], id)
    redis.call('HSET', KEYS[member], 'spec', spec)
    if user then redis.call('SADD', KEYS[6], id) end
end
return 'created'
"""
)

EXPIRE = Script[int](
    SETTLE
    + MAY_EXPIRE
    + """
-- KEYS: session, stream, deadlines, verdicts, settled   ARGV: id, outcome, verdict, now, terms of the outcome
local deadline = redis.call('ZSCORE', KEYS[3], ARGV[1])
if not deadline or tonumber(deadline) > tonumber(ARGV[4]) then return 0 end
local terms = redis.call('HGET', KEYS[1], 'terms')
if terms and terms ~= ARGV[5] then return 0 end -- it was described meanwhile: the next poll reads it again
redis.call('ZREM', KEYS[3], ARGV[1])
if not may_expire(KEYS[1]) then return 0 end
local entry = redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
redis.call('HSETNX', KEYS[1], 'outcome', ARGV[2])
redis.call('HSET', KEYS[1], 'verdict', ARGV[3], 'e:' .. entry, '')
redis.call('HINCRBY', KEYS[4], 'session:expired', 1)
settle(KEYS[5], KEYS[2], ARGV[1])
return 1
"""
)

LIST_AGAIN = Script[int]("""
-- KEYS: session, sessions   ARGV: id, creation time   Returns 1 if it exists and was not listed, else 0.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
return redis.call('ZADD', KEYS[2], 'NX', ARGV[2], ARGV[1])
""")

TIME_AGAIN = Script[int](
    MAY_EXPIRE
    + """
-- KEYS: session, deadlines   ARGV: id, deadline   Returns 1 if it may expire and had none, else 0.
if redis.call('EXISTS', KEYS[1]) == 0 or not may_expire(KEYS[1]) then return 0 end
return redis.call('ZADD', KEYS[2], 'NX', ARGV[2], ARGV[1])
"""
)

PUT_OFF = Script[None]("""
-- KEYS: deadlines   ARGV: id, deadline
redis.call('ZREM', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
redis.call('ZADD', KEYS[1], 'XX', ARGV[2], ARGV[1])
""")

HEARTBEAT = Script[int]("""
-- KEYS: session, deadlines   ARGV: id, now, expires
local spec, outcome, verdict = unpack(redis.call('HMGET', KEYS[1], 'spec', 'outcome', 'verdict'))
if not spec or outcome or verdict then return 0 end
redis.call('HSET', KEYS[1], 'beat', ARGV[2])
redis.call('ZADD', KEYS[2], 'GT', ARGV[3], ARGV[1])
return 1
""")

LIST = Script[list[bytes]]("""
-- KEYS: sessions   ARGV: created, id, count, 1 for the newest first or 0
-- Returns up to `count` sessions after that position in this order, each with its creation time.
local most, created, id, newest = tonumber(ARGV[3]), tonumber(ARGV[1]), ARGV[2], ARGV[4] == '1'
local function behind(name) -- compares bytes as sorted sets do; Lua's own comparison depends on the locale
    for at = 1, math.min(#name, #id) do
        local one, other = string.byte(name, at), string.byte(id, at)
        if one ~= other then return (one > other) ~= newest end
    end
    if newest then return #name < #id end
    return #name > #id
end
local command, last = 'ZRANGEBYSCORE', '+inf'
if newest then command, last = 'ZREVRANGEBYSCORE', '-inf' end
local found, offset = {}, 0
repeat -- bounded: it goes on only among sessions of one creation time
    local page = redis.call(command, KEYS[1], ARGV[1], last, 'WITHSCORES', 'LIMIT', offset, most)
    for at = 1, #page, 2 do
        local after = tonumber(page[at + 1]) ~= created or behind(page[at])
        if after and #found < 2 * most then
            found[#found + 1] = page[at]
            found[#found + 1] = page[at + 1]
        end
    end
    offset = offset + most
until #page < 2 * most or #found == 2 * most
return found
""")

SUMMARIES = Script[list[list[Any]]]("""
-- KEYS: session…
-- Returns of each session how many turns its hash has, and the other fields with their values, but neither
-- verdicts and numbers of trained turns nor marks of retried requests nor ids of entries. A list reads no
-- tokens by it.
local found = {}
for at, session in ipairs(KEYS) do -- bounded: SUMMARY_FIELDS_AT_ONCE
    local turns, names = 0, {}
    for _, field in ipairs(redis.call('HKEYS', session)) do -- bounded: one session
        local kind = string.sub(field, 1, 2)
        if kind == 't:' then turns = turns + 1
        elseif not string.find('v: n: q: e:', kind, 1, true) then names[#names + 1] = field end
    end
    local summary = {turns}
    for _, name in ipairs(names) do
        summary[#summary + 1] = name
        summary[#summary + 1] = redis.call('HGET', session, name)
    end
    found[at] = summary
end
return found
""")

PROGRESS = Script[list[list[Any]]]("""
-- KEYS: session…   Returns of each: spec, outcome, whether it has a verdict, whether it has a reward
local found = {}
for _, session in ipairs(KEYS) do -- bounded: SESSIONS_PER_SCRIPT
    local spec, outcome, verdict = unpack(redis.call('HMGET', session, 'spec', 'outcome', 'verdict'))
    local rewarded = 0
    if outcome and not verdict then
        for _, field in ipairs(redis.call('HKEYS', session)) do -- bounded: one session
            if string.sub(field, 1, 2) == 'r:' then rewarded = 1 break end
        end
    end
    found[#found + 1] = {spec or '', outcome or '', verdict and 1 or 0, rewarded}
end
return found
""")
