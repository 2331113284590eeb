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
-- KEYS: lease, fence   ARGV: holder, token, lease in ms, 1 if the caller's lease has not run out, or 0
-- Returns 1; 2 if Redis had lost the fence, which is there again; 0 if the caller is no longer the trainer.
-- Without a fence, nobody knows whether another trainer has claimed the lease since the caller's ran out.
local fence, holder = redis.call('GET', KEYS[2]), redis.call('GET', KEYS[1])
if not fence then
    if holder and holder ~= ARGV[1] then return 0 end
    redis.call('DEL', KEYS[1]) -- a full Redis accepts this, and then refuses no later write
    if ARGV[4] == '0' then
        redis.call('SET', KEYS[2], 'nobody')
        return 0
    end
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
    redis.call('SET', KEYS[2], ARGV[2])
    return 2
end
if fence ~= ARGV[2] then return 0 end
if redis.call('PEXPIRE', KEYS[1], ARGV[3]) == 0 then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3]) end
return 1
"""

RELEASE = """
-- KEYS: lease   ARGV: holder
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
