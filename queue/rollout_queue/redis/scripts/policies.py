"""Scripts that reserve, register and remove the version numbers of policies.

Together they keep one invariant: a version number names one set of weights. RESERVE reserves a number only if
it is higher than every registered or reserved one; REGISTER stores nothing if a version was registered or
reserved since its caller looked.
"""

from rollout_queue.redis.scripts.functions import FENCED

RESERVE = (
    FENCED
    + """
-- KEYS: fence, reserved, policies   ARGV: token, version, location
-- Returns the highest version that was registered or reserved before. The hash has the highest reservation,
-- and the locations of the last 100 that may still be registered, by their numbers.
local registered = -1
for _, version in ipairs(redis.call('HKEYS', KEYS[3])) do -- bounded: versions whose files are there
    registered = math.max(registered, tonumber(version))
end
local newest = math.max(registered, tonumber(redis.call('HGET', KEYS[2], 'version') or -1))
local asked = tonumber(ARGV[2])
if asked > newest then
    redis.call('HDEL', KEYS[2], '') -- a full Redis accepts this, and then refuses no later write
    for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do -- bounded: some 100
        local number = tonumber(name)
        if number and (number <= registered or number <= asked - 100) then
            redis.call('HDEL', KEYS[2], name)
        end
    end
    redis.call('HSET', KEYS[2], 'version', ARGV[2], 'location', ARGV[3], ARGV[2], ARGV[3])
end
return newest
"""
)

REGISTER = """
-- KEYS: policies, reserved
-- ARGV: version, record; and as the caller has read them: number of policies, record of this version,
--       reserved version
-- Returns 1 if the policy is registered, 0 if anything has changed since the caller read it.
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[3]) then return 0 end
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[4] then return 0 end
if (redis.call('HGET', KEYS[2], 'version') or '') ~= ARGV[5] then return 0 end
redis.call('HDEL', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

REGISTER_AGAIN = """
-- KEYS: policies, serving plan   ARGV: version, plan, record
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] then return 0 end
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[3])
return 1
"""

STORE = """
-- KEYS: policies   ARGV: version, record
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""

REMOVE = """
-- KEYS: policies, serving plan, removed   ARGV: version, plan
-- Returns 1 if the version is removed. The newest version stays, because its number is never given again.
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] then return 0 end
local newer = false
for _, version in ipairs(redis.call('HKEYS', KEYS[1])) do -- bounded: so, too
    newer = newer or tonumber(version) > tonumber(ARGV[1])
end
if not newer then return 0 end
if redis.call('HDEL', KEYS[1], ARGV[1]) == 1 then redis.call('SADD', KEYS[3], ARGV[1]) end
if redis.call('SCARD', KEYS[3]) > 2000 then -- of older ones nobody asks
    for _, version in ipairs(redis.call('SMEMBERS', KEYS[3])) do -- bounded: 2001
        if tonumber(version) <= tonumber(ARGV[1]) - 1000 then redis.call('SREM', KEYS[3], version) end
    end
end
return 1
"""

FORGET = """
-- KEYS: policies   ARGV: version, record
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
"""
