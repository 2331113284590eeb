"""Scripts of a user's client session: its signs of life, its end, and the end of its records.

No script writes to a session without a record, so that what was forgotten does not come back.
"""

BEAT = """
-- KEYS: session, live sessions   ARGV: session id, time
-- Returns 0 if the session has finished, or is not there.
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return 0 end
if redis.call('HEXISTS', KEYS[1], 'finished') == 1 then return 0 end
redis.call('HSET', KEYS[1], 'beat', ARGV[2])
redis.call('ZADD', KEYS[2], 'XX', ARGV[2], ARGV[1])
return 1
"""

END_SESSION = """
-- KEYS: session, ended sessions   ARGV: session id, time, how it finished or ''
-- The first end and the first finish stay. A full Redis accepts ZREM, and then refuses no later write.
redis.call('ZREM', KEYS[2], '')
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return 0 end
if ARGV[3] ~= '' then redis.call('HSETNX', KEYS[1], 'finished', ARGV[3]) end
redis.call('ZADD', KEYS[2], 'NX', ARGV[2], ARGV[1])
return 1
"""

ADD_MADE = """
-- KEYS: session, made in it, ended sessions   ARGV: session id, model id
-- Notes a model. Returns 'unknown' without the session; 'ended' if the session has ended before the model.
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return 'unknown' end
if redis.call('SISMEMBER', KEYS[2], ARGV[2]) == 1 then return 'noted' end
if redis.call('ZSCORE', KEYS[3], ARGV[1]) then return 'ended' end
redis.call('SADD', KEYS[2], ARGV[2])
return 'noted'
"""

ADD_TARGET = """
-- KEYS: session, made in it, target   ARGV: sampling session id, target
-- The first target stays. Returns 0 without the session.
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return 0 end
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('SETNX', KEYS[3], ARGV[2])
return 1
"""

FORGET_MODEL = """
-- KEYS: model, kept, terms of what is kept, models of the owner   ARGV: model id
-- Removes a model that has ended and has no named weights. Of one that has them, the digests of its commands
-- are removed. Returns whether it is gone.
for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do
    if not string.find(name, '/~', 1, true) then
        for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
            if string.sub(field, 1, 2) == 'd:' then redis.call('HDEL', KEYS[1], field) end
        end
        return 0
    end
end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
return 1
"""

FORGET_SESSION = """
-- KEYS: session, made in it, sessions of the owner, ended sessions, live sessions   ARGV: session id
-- Removes a session, if nothing that it has made is left. Returns whether it is gone.
if redis.call('SCARD', KEYS[2]) > 0 then return 0 end
redis.call('UNLINK', KEYS[1])
for at = 3, 5 do redis.call('ZREM', KEYS[at], ARGV[1]) end
return 1
"""
