"""Scripts that claim, renew and release the trainer's lease."""

CLAIM = """
-- KEYS: lease, fence   ARGV: holder, token, life in ms, a holder that is dead or ''
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[4] and holder ~= ARGV[1] then return {holder, redis.call('PTTL', KEYS[1])} end
-- A full Redis refuses SET, unless the script has written before; and the trainer is who makes room in it.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2])
return false
"""

RENEW = """
-- KEYS: lease, fence   ARGV: holder, token, life in ms
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
if redis.call('PEXPIRE', KEYS[1], ARGV[3]) == 0 then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3]) end
return 1
"""

RELEASE = """
-- KEYS: lease   ARGV: holder
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
