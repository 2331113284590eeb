"""Scripts of the command log: its commands in order, and their results.

The hash `held` has the `bytes` of all commands in the log, early ones included, the bytes of `unread`
results, and the `most` that both may be together.

What commands have made lasts: it is kept under its name, deleted, and forgotten.

name ─ kept ─▶ deleted ─▶ a note, until the trainer has removed the files ─▶ forgotten

Weights to sample from that are overwritten are kept without a name, until their client is gone.
"""

from rollout_queue.redis.lease import FencedScript
from rollout_queue.redis.lua import Script

LAST_PLACE = """
local function last_place(stream) -- of the newest command that the log ever had
    if redis.call('EXISTS', stream) == 0 then return '0-0' end
    local told = redis.call('XINFO', 'STREAM', stream)
    for at = 1, #told, 2 do
        if told[at] == 'last-generated-id' then return told[at + 1] end
    end
end
"""

DROPPING = """
local function unpacked(record) return cmsgpack.unpack(string.sub(record, 2)) end

local function is_later(one, other) -- of two places in the log
    local ms, at = string.match(one, '^(%d+)%-(%d+)$')
    local other_ms, other_at = string.match(other, '^(%d+)%-(%d+)$')
    if ms ~= other_ms then return tonumber(ms) > tonumber(other_ms) end
    return tonumber(at) > tonumber(other_at)
end

local function drop_adapter(notes, kept) -- an adapter that nobody can name any more
    local made = kept['made']
    if made['type'] == 'published' and made['policy'] ~= '' and (kept['position'] or '') ~= '' then
        redis.call('HSETNX', notes, made['policy'] .. '|' .. made['version'], kept['position'])
    end
end

local function keep(model, name, record, ended)
    -- A command may be answered again: what was kept or deleted after it stays so. KEYS as in ANSWER.
    local kept, packed = unpacked(record), redis.call('HGET', KEYS[7], name)
    local member = model .. '|' .. name
    for saved in string.gmatch(redis.call('HGET', KEYS[8], member) or '', '([%d-]+)>') do
        if not is_later(kept['position'], saved) then return end
    end
    if ended and string.find(name, '/~', 1, true) then return drop_adapter(KEYS[9], kept) end
    if packed then
        local before = unpacked(packed)
        if before['number'] >= kept['number'] then return end
        redis.call('HDEL', KEYS[10], name .. '#' .. before['number'])
        redis.call('ZREM', KEYS[11], member .. '|' .. before['number'])
        if ended then
            drop_adapter(KEYS[9], before)
        elseif before['made']['type'] == 'published' then -- samples of it may wait
            redis.call('HSET', KEYS[7], 'sampler_weights/~replaced-' .. before['number'], packed)
        end
    end
    redis.call('HSET', KEYS[7], name, record)
    local terms = redis.call('HGET', KEYS[10], name .. '#' .. kept['number'])
    local ttl_s = terms and cjson.decode(terms)['ttl_s']
    if type(ttl_s) == 'number' then
        redis.call('ZADD', KEYS[11], kept['created_at'] + ttl_s, member .. '|' .. kept['number'])
    end
end
"""

DROP = Script[int](
    DROPPING
    + LAST_PLACE
    + """
-- KEYS: kept, terms, expires, dropped, dropped adapters, stream
-- ARGV: model id, name, number of the command, time by which it must have expired or ''
-- Deletes what is kept under this name, if that command has made it. Returns whether it has.
local record = redis.call('HGET', KEYS[1], ARGV[2])
local member = ARGV[1] .. '|' .. ARGV[2]
if ARGV[4] ~= '' then
    local ends = redis.call('ZSCORE', KEYS[3], member .. '|' .. ARGV[3])
    if not ends or tonumber(ends) > tonumber(ARGV[4]) then return 0 end
end
redis.call('ZREM', KEYS[3], member .. '|' .. ARGV[3])
if not record then return 0 end
local kept = unpacked(record)
if kept['number'] ~= tonumber(ARGV[3]) then return 0 end
redis.call('HDEL', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[2] .. '#' .. ARGV[3])
drop_adapter(KEYS[5], kept)
local last = last_place(KEYS[6])
local saved = kept['position'] or ''
local drop = (saved == '' and last or saved) .. '>' .. last
local drops = redis.call('HGET', KEYS[4], member)
redis.call('HSET', KEYS[4], member, drops and drops .. ' ' .. drop or drop)
return 1
"""
)

CHANGE = Script[int](
    DROPPING
    + """
-- KEYS: kept, terms, expires   ARGV: model id, name, number of the command, terms before and after, end or ''
-- Replaces the terms of what is kept, unless they are no longer those before. Returns whether it has.
local record, field = redis.call('HGET', KEYS[1], ARGV[2]), ARGV[2] .. '#' .. ARGV[3]
if not record or unpacked(record)['number'] ~= tonumber(ARGV[3]) then return 0 end
if (redis.call('HGET', KEYS[2], field) or '') ~= ARGV[4] then return 0 end
redis.call('HSET', KEYS[2], field, ARGV[5])
local member = ARGV[1] .. '|' .. ARGV[2] .. '|' .. ARGV[3]
if ARGV[6] == '' then
    redis.call('ZREM', KEYS[3], member)
else
    redis.call('ZADD', KEYS[3], ARGV[6], member)
end
return 1
"""
)

FORGET_WEIGHTS = FencedScript[None](
    DROPPING
    + """
-- KEYS: fence, dropped   ARGV: token, member, place
-- Forgets the deletions up to this place.
local left = {}
for drop in string.gmatch(redis.call('HGET', KEYS[2], ARGV[2]) or '', '%S+') do
    if is_later(string.match(drop, '>(.*)$'), ARGV[3]) then left[#left + 1] = drop end
end
redis.call('HDEL', KEYS[2], ARGV[2])
if #left > 0 then redis.call('HSET', KEYS[2], ARGV[2], table.concat(left, ' ')) end
return 1
"""
)

FORGET_ADAPTER = FencedScript[None]("""
-- KEYS: fence, dropped adapters   ARGV: token, member
return redis.call('HDEL', KEYS[2], ARGV[2])
""")


OVERHEAD = 200
"""Bytes that a command or result takes in Redis beside its own, about."""
REMEMBERED = 10_000
"""How many of a model's last commands are known when they come again."""

OPEN = Script[bytes | int | None]("""
-- KEYS: model, models of the owner [, client session]   ARGV: model id, spec, time
-- Makes a model that takes commands. Returns false, or the spec that it has already; 0 if the client session
-- is gone.
if KEYS[3] and redis.call('HEXISTS', KEYS[3], 'record') == 0 then return 0 end
local known = redis.call('HGET', KEYS[1], 'spec')
if known then return known end
redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'next', 0)
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
return false
""")

SUBMIT = Script[list[bytes]](f"""
-- KEYS: model, stream, held, unread
-- ARGV: model id, number, digest, command, most bytes, most early, now in ms, whether it has data, kind
local number = tonumber(ARGV[2])
local next = tonumber(redis.call('HGET', KEYS[1], 'next'))
if not next then return {{'unknown'}} end
local known = redis.call('HGET', KEYS[1], 'd:' .. number)
if known then return {{known == ARGV[3] and 'known' or 'other'}} end
local ended = redis.call('HGET', KEYS[1], 'ended')
if ended then return {{'ended', ended}} end
if number < next then return {{'other'}} end
if number - next > tonumber(ARGV[6]) then return {{'far', next}} end

-- Results that nobody has read expire, and then count no more.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[7], 'LIMIT', 0, 100)) do
    redis.call('HINCRBY', KEYS[3], 'unread', -tonumber(string.match(member, '%d+$')))
    redis.call('ZREM', KEYS[4], member)
end

local size, most = #ARGV[4] + {OVERHEAD}, tonumber(ARGV[5])
local held = tonumber(redis.call('HGET', KEYS[3], 'bytes') or 0)
local unread = tonumber(redis.call('HGET', KEYS[3], 'unread') or 0)
local room = most
if ARGV[8] == '0' then
    room = 3 * most -- a command without data frees what waits for it
elseif held + unread + size > most then
    -- The model of the oldest command may fill as much again, also with commands that come early: nothing is
    -- freed before its step is made.
    local oldest = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
    if oldest and oldest[2][2] ~= ARGV[1] then return {{'full'}} end
    if held + size > 2 * most then return {{number == next and 'too large' or 'full'}} end
    room = 2 * most
end
if held + size > room then return {{'full'}} end

redis.call('HINCRBY', KEYS[3], 'bytes', size)
redis.call('HSET', KEYS[3], 'most', most)
redis.call('HSET', KEYS[1], 'd:' .. number, ARGV[3], 'k:' .. number, ARGV[9] .. ' ' .. ARGV[7])
redis.call('HDEL', KEYS[1], 'd:' .. (number - {REMEMBERED}), 'k:' .. (number - {REMEMBERED}))
if number > next then
    redis.call('HSET', KEYS[1], 'e:' .. number, ARGV[4])
    return {{'new'}}
end
local command = ARGV[4]
while command do -- bounded: the commands that came early, whose bytes are bounded
    redis.call('XADD', KEYS[2], '*', 'm', ARGV[1], 'n', next, 'c', command)
    redis.call('HDEL', KEYS[1], 'e:' .. next)
    next = next + 1
    command = redis.call('HGET', KEYS[1], 'e:' .. next)
end
redis.call('HSET', KEYS[1], 'next', next)
return {{'new'}}
""")

ANSWER = FencedScript[None](
    DROPPING
    + f"""
-- KEYS: fence, model, result, announcements, unread, held, kept, dropped, dropped adapters, terms, expires
-- ARGV: token, request id, number, result, ms to live, when it expires in ms, name and record of what is
-- kept, model id
-- A full Redis has to accept a result, after which the trainer frees the log. It accepts HDEL, and then
-- refuses no later write of the script.
redis.call('HDEL', KEYS[6], '')
if redis.call('EXISTS', KEYS[2]) == 0 then -- the model was deleted while this was carried out
    if ARGV[7] ~= '' then drop_adapter(KEYS[9], unpacked(ARGV[8])) end
    return 1
end
-- The first result stays: a client may have read it.
if redis.call('SET', KEYS[3], ARGV[4], 'NX', 'PX', ARGV[5]) then
    local size = #ARGV[4] + {OVERHEAD}
    if redis.call('ZADD', KEYS[5], ARGV[6], ARGV[2] .. '|' .. size) == 1 then
        redis.call('HINCRBY', KEYS[6], 'unread', size)
    end
end
local done = tonumber(redis.call('HGET', KEYS[2], 'done') or -1)
if tonumber(ARGV[3]) > done then redis.call('HSET', KEYS[2], 'done', ARGV[3]) end
if ARGV[7] ~= '' then keep(ARGV[9], ARGV[7], ARGV[8], redis.call('HGET', KEYS[2], 'ended')) end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'r', ARGV[2])
return 1
"""
)

READ_RESULT = Script[list[bytes]](f"""
-- KEYS: result, model, unread, held   ARGV: request id, number, ms to live once it was read
-- Returns {{result}}; {{'waits'}} if there is none yet; {{'gone'}} if there is none any more, or never was.
local result = redis.call('GET', KEYS[1])
if result then
    local size = #result + {OVERHEAD}
    if redis.call('ZREM', KEYS[3], ARGV[1] .. '|' .. size) == 1 then
        redis.call('HINCRBY', KEYS[4], 'unread', -size)
        redis.call('PEXPIRE', KEYS[1], ARGV[3])
    end
    return {{'done', result}}
end
if redis.call('HEXISTS', KEYS[2], 'd:' .. ARGV[2]) == 0 then return {{'gone'}} end
local done = tonumber(redis.call('HGET', KEYS[2], 'done') or -1)
return {{tonumber(ARGV[2]) > done and 'waits' or 'gone'}}
""")

FREE = FencedScript[int](f"""
-- KEYS: fence, stream, held   ARGV: token, position, how many at most
-- Removes the first commands up to the position. Returns how many.
local found = redis.call('XRANGE', KEYS[2], '-', ARGV[2], 'COUNT', ARGV[3])
local size = 0
for _, entry in ipairs(found) do
    size = size + #entry[2][6] + {OVERHEAD}
    redis.call('XDEL', KEYS[2], entry[1])
end
if size > 0 then redis.call('HINCRBY', KEYS[3], 'bytes', -size) end
return #found
""")

END = Script[int](f"""
-- KEYS: model, held   ARGV: why
-- The model takes no more commands. Those that came early and wait for others will never be carried out.
redis.call('HDEL', KEYS[1], '')
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'ended') == 1 then return 0 end
redis.call('HSET', KEYS[1], 'ended', ARGV[1])
local size = 0
-- bounded: a model has REMEMBERED commands, and as many that came early as the log lets it
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    local number = string.match(field, '^e:(%d+)$')
    if number then
        size = size + #redis.call('HGET', KEYS[1], field) + {OVERHEAD}
        redis.call('HDEL', KEYS[1], field, 'd:' .. number, 'k:' .. number)
    end
end
if size > 0 then redis.call('HINCRBY', KEYS[2], 'bytes', -size) end
return 1
""")
