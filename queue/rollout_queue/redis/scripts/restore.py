"""The script that writes a whole recorded session."""

from rollout_queue.redis.scripts.functions import SETTLE

SAME = "SAME"
"""Stands for a record of the stream with the same bytes as the session's field."""

RESTORE = (
    SETTLE
    + """
-- KEYS: session, stream, sessions, deadlines, verdicts, deleted, deleted users, settled, forgotten ids,
--       user…, sessions that show an image… [, group, members]
-- ARGV: id, spec, created, deadline, owner, size, verdict, verdict code, number of users, digest of user…,
--       number of images, group, (field, value, record for the stream: empty for none, SAME, or its bytes)…
local id, users = ARGV[1], tonumber(ARGV[9])
local images = tonumber(ARGV[10 + users])
local group = 10 + users + images
local function forgotten(name) return redis.call('ZSCORE', KEYS[9], name) end
if redis.call('HEXISTS', KEYS[6], id) == 1 then return 'deleted' end
for user = 1, users do
    if redis.call('SISMEMBER', KEYS[7], ARGV[9 + user]) == 1 then return 'deleted' end
end
if redis.call('EXISTS', KEYS[1]) == 1 then return 'exists' end
if forgotten('s:' .. id) then return 'forgotten' end
if KEYS[group] then
    local size, owner = unpack(redis.call('HMGET', KEYS[group], 'size', 'owner'))
    if not owner and forgotten('g:' .. ARGV[11 + users]) then return 'forgotten' end
    if owner and owner ~= ARGV[5] then return 'owner' end
    if not size or size == '' then size = ARGV[6] end
    if ARGV[6] ~= '' and size ~= ARGV[6] then return 'size' end
    if size ~= '' and redis.call('SCARD', KEYS[group + 1]) >= tonumber(size)
        and redis.call('SISMEMBER', KEYS[group + 1], id) == 0 then return 'full' end
    redis.call('HSET', KEYS[group], 'size', size, 'owner', ARGV[5])
    redis.call('SADD', KEYS[group + 1], id)
end
redis.call('HSET', KEYS[1], 'spec', ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[3], id)
for set = 10, 9 + users + images do redis.call('SADD', KEYS[set], id) end
for index = 12 + users, #ARGV, 3 do -- bounded: one session
    redis.call('HSET', KEYS[1], ARGV[index], ARGV[index + 1])
    local record = ARGV[index + 2]
    if record == 'SAME' then record = ARGV[index + 1] end
    if record ~= '' then
        redis.call('HSET', KEYS[1], 'e:' .. redis.call('XADD', KEYS[2], '*', 'r', record), '')
    end
end
if ARGV[8] == '' then
    redis.call('ZADD', KEYS[4], ARGV[4], id)
else
    redis.call('HSET', KEYS[1], 'verdict', ARGV[7])
    redis.call('HINCRBY', KEYS[5], 'session:' .. ARGV[8], 1)
    settle(KEYS[8], KEYS[2], id)
end
return 'restored'
"""
)
