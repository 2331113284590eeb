"""Scripts that add and remove the adapters that are policies of their own.

The revision grows with each change, also after a loss of Redis, because it is at least the time in
milliseconds.
"""

REVISE = """
local function revise(key, now_ms)
    local revision = math.max(tonumber(redis.call('GET', key) or 0) + 1, tonumber(now_ms))
    redis.call('SET', key, string.format('%.0f', revision))
end
"""

ADD = (
    REVISE
    + """
-- KEYS: adapters, their last versions, revision
-- ARGV: field, record, name, version, most adapters, now in ms, whether it may come back
-- An adapter that may come back has no last version: its name, a model's, would stay for ever.
-- Returns 1 if it is added, 0 if the version is not above the last one of the name, -1 if there are too
-- many.
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then return -1 end
local last = tonumber(redis.call('HGET', KEYS[2], ARGV[3]) or -1)
if last >= tonumber(ARGV[4]) and ARGV[7] == '0' then return 0 end
redis.call('HDEL', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[7] == '0' then redis.call('HSET', KEYS[2], ARGV[3], math.max(last, tonumber(ARGV[4]))) end
revise(KEYS[3], ARGV[6])
return 1
"""
)

REMOVE = (
    REVISE
    + """
-- KEYS: adapters, revision   ARGV: field, now in ms
local removed = redis.call('HDEL', KEYS[1], ARGV[1])
if removed == 1 then revise(KEYS[2], ARGV[2]) end
return removed
"""
)
