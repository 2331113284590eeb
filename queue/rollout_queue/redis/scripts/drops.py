"""Scripts of what commands have made that lasts: how it is kept under its name, deleted, and forgotten.

name ─ kept ─▶ deleted ─▶ a note, until the trainer has removed the files ─▶ forgotten

Weights to sample from that are overwritten are kept without a name, until their client is gone.
"""

from rollout_queue.redis.scripts.functions import FENCED

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

DROP = (
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

CHANGE = (
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

FORGET_WEIGHTS = (
    FENCED
    + DROPPING
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

FORGET_ADAPTER = (
    FENCED
    + """
-- KEYS: fence, dropped adapters   ARGV: token, member
return redis.call('HDEL', KEYS[2], ARGV[2])
"""
)
