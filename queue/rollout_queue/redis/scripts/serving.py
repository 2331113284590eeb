"""Scripts that change the serving plan, and that claim and release the lease of the push driver.

A full Redis refuses a script whose first write is SET or HSET, and accepts DEL and HDEL, so these come first.
"""

REPLACE = """
-- KEYS: plan, server pushes, pushes, canaries, canary log, canary report
-- ARGV: plan as read or '', new plan, whether a push begins, whether a canary begins, how many pushes and
--       canaries are kept, push that ends or '', canary that ends or ''
-- Returns 1 if the plan is replaced, 0 if it has changed since the caller read it.
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] == '1' then redis.call('DEL', KEYS[2]) end
if ARGV[4] == '1' then redis.call('DEL', KEYS[5], KEYS[6]) end
for place, list in ipairs({KEYS[3], KEYS[4]}) do
    local ended = ARGV[5 + place]
    if ended ~= '' then redis.call('LPUSH', list, ended) end
    redis.call('LTRIM', list, 0, tonumber(ARGV[5]) - 1)
end
return 1
"""

NOTE_SERVERS = """
-- KEYS: server pushes   ARGV: server, server push, …
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], unpack(ARGV)) -- bounded: NOTES servers
"""

HOLD_LEASE = """
-- KEYS: lease   ARGV: token, lease in ms
-- Returns 1 if the caller holds the lease now.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

RELEASE_LEASE = """
-- KEYS: lease   ARGV: token
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
