"""Scripts of a user's client session: its signs of life, its end, and the end of its records.

record ─▶ deleted, or forgotten ─▶ what it has made goes ─▶ nothing

No script writes to a session without a `record`, so that what was deleted or forgotten does not come back.

The promise of a sample is `''`, and then once a result, or what a cancellation says.
"""

from rollout_queue.redis.command_scripts import LAST_PLACE, OVERHEAD
from rollout_queue.redis.lua import Script
from rollout_queue.trainer_commands import WHOLE_MODEL

ADD_SESSION = Script[int]("""
-- KEYS: session, sessions of the owner, live sessions, deleted users, records of the user
-- ARGV: session id, record, time, digest of the user or ''
-- Returns 0 if the data of the user was deleted.
if ARGV[4] ~= '' and redis.call('SISMEMBER', KEYS[4], ARGV[4]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'beat', ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
if ARGV[4] ~= '' then redis.call('SADD', KEYS[5], ARGV[1]) end
return 1
""")

BEAT = Script[int]("""
-- KEYS: session, live sessions   ARGV: session id, time
-- Returns 0 if the session has finished, or is not there.
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return 0 end
if redis.call('HEXISTS', KEYS[1], 'finished') == 1 then return 0 end
redis.call('HSET', KEYS[1], 'beat', ARGV[2])
redis.call('ZADD', KEYS[2], 'XX', ARGV[2], ARGV[1])
return 1
""")

END_SESSION = Script[int]("""
-- KEYS: session, ended sessions   ARGV: session id, time, how it finished or ''
-- The first end and the first finish stay. A full Redis accepts ZREM, and then refuses no later write.
redis.call('ZREM', KEYS[2], '')
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return 0 end
if ARGV[3] ~= '' then redis.call('HSETNX', KEYS[1], 'finished', ARGV[3]) end
redis.call('ZADD', KEYS[2], 'NX', ARGV[2], ARGV[1])
return 1
""")

ADD_MADE = Script[bytes]("""
-- KEYS: session, made in it, ended sessions   ARGV: session id, model id
-- Notes a model. Returns 'unknown' without the session; 'ended' if the session has ended before the model.
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return 'unknown' end
if redis.call('SISMEMBER', KEYS[2], ARGV[2]) == 1 then return 'noted' end
if redis.call('ZSCORE', KEYS[3], ARGV[1]) then return 'ended' end
redis.call('SADD', KEYS[2], ARGV[2])
return 'noted'
""")

ADD_TARGET = Script[int]("""
-- KEYS: session, made in it, target   ARGV: sampling session id, target
-- The first target stays. Returns 0 without the session.
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return 0 end
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('SETNX', KEYS[3], ARGV[2])
return 1
""")

NOTE_TERMS = Script[None]("""
-- KEYS: model, terms of what is kept   ARGV: field, terms
-- The first terms stay. A model that is gone gets none.
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSETNX', KEYS[2], ARGV[1], ARGV[2]) end
""")

CLOSE_SESSION = Script[list[bytes] | None]("""
-- KEYS: session, live sessions, ended sessions, sessions that are deleted
-- ARGV: session id, 'deleted' or 'forgotten', time
-- From here on, no request finds the session. Returns what was said first, and the record; nothing if the
-- session is gone. A deletion is noted, so that any gateway goes on with it if it is interrupted.
redis.call('ZREM', KEYS[2], ARGV[1]) -- a full Redis accepts this, and then refuses no later write
local record = redis.call('HGET', KEYS[1], 'record')
if record then
    redis.call('HDEL', KEYS[1], 'record')
    redis.call('HSET', KEYS[1], ARGV[2], record)
    if ARGV[2] == 'deleted' then
        redis.call('ZREM', KEYS[3], ARGV[1])
        redis.call('ZADD', KEYS[4], ARGV[3], ARGV[1])
    end
end
for _, said in ipairs({'deleted', 'forgotten'}) do
    record = redis.call('HGET', KEYS[1], said)
    if record then return {said, record} end
end
""")

FORGET_MODEL = Script[int](
    LAST_PLACE
    + f"""
-- KEYS: model, kept, terms of what is kept, models of the owner, dropped, stream, records of the user
-- ARGV: model id, '' if it is of no user
-- Removes a model that has ended and has no named weights. Of one that has them, what is known of its
-- commands is removed, and it goes with its user's data. Returns whether it is gone. The trainer is told,
-- because the log has its commands, perhaps.
redis.call('HDEL', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end -- removed meanwhile, and its user's data, perhaps
for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do -- bounded: what one model has saved
    if not string.find(name, '/~', 1, true) then
        local known = {{}}
        for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do -- bounded: by REMEMBERED commands
            if string.match(field, '^[dk]:') then known[#known + 1] = field end
        end
        for first = 1, #known, 1000 do
            redis.call('HDEL', KEYS[1], unpack(known, first, math.min(first + 999, #known))) -- bounded: so
        end
        if ARGV[2] ~= '' then redis.call('SADD', KEYS[7], ARGV[1]) end
        return 0
    end
end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('SREM', KEYS[7], ARGV[1])
local last = last_place(KEYS[6])
redis.call('HSET', KEYS[5], ARGV[1] .. '|{WHOLE_MODEL}', last .. '>' .. last)
return 1
"""
)

FORGET_RESULTS = Script[None](f"""
-- KEYS: unread, held, result…   ARGV: request id…
for at = 3, #KEYS do -- bounded: RESULTS_AT_ONCE
    local size = redis.call('STRLEN', KEYS[at]) + {OVERHEAD}
    if redis.call('ZREM', KEYS[1], ARGV[at - 2] .. '|' .. size) == 1 then
        redis.call('HINCRBY', KEYS[2], 'unread', -size)
    end
    redis.call('UNLINK', KEYS[at])
end
""")

FORGET_SESSION = Script[int]("""
-- KEYS: session, made in it, sessions of the owner, live sessions, ended sessions, sessions that are deleted,
--       records of the user
-- ARGV: session id
-- Removes a session, if nothing that it has made is left. Returns whether it is gone.
if redis.call('SCARD', KEYS[2]) > 0 then return 0 end
redis.call('UNLINK', KEYS[1])
for at = 3, 6 do redis.call('ZREM', KEYS[at], ARGV[1]) end
redis.call('SREM', KEYS[7], ARGV[1])
return 1
""")


RENEW = Script[int]("""
-- KEYS: result   ARGV: seconds to live
-- Returns 0 if the promise has ended, so that nobody waits for its sample.
local found = redis.call('GET', KEYS[1])
if found and found ~= '' then return 0 end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
""")

KEEP = Script[int]("""
-- KEYS: result, announcements   ARGV: promise, result, seconds to live
-- What was said first stays, because polls may have read it.
local found = redis.call('GET', KEYS[1])
if found and found ~= '' then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'r', ARGV[1])
return 1
""")

CANCEL = Script[int]("""
-- KEYS: result, announcements   ARGV: promise, what its polls get from now on, seconds to live
-- Ends a promise whose sample is being made, and tells its maker. What is made already stays. Returns whether
-- it has ended.
if redis.call('GET', KEYS[1]) ~= '' then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'r', ARGV[1])
return 1
""")
