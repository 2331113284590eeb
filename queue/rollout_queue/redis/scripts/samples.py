"""Scripts of the promises of samples: `''`, and then once a result, or what a cancellation says."""

RENEW = """
-- KEYS: result   ARGV: seconds to live
-- Returns 0 if the promise has ended, so that nobody waits for its sample.
local found = redis.call('GET', KEYS[1])
if found and found ~= '' then return 0 end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""

KEEP = """
-- KEYS: result, announcements   ARGV: promise, result, seconds to live
-- What was said first stays, because polls may have read it.
local found = redis.call('GET', KEYS[1])
if found and found ~= '' then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'r', ARGV[1])
return 1
"""

CANCEL = """
-- KEYS: result, announcements   ARGV: promise, what its polls get from now on, seconds to live
-- Ends a promise whose sample is being made, and tells its maker. What is made already stays. Returns whether
-- it has ended.
if redis.call('GET', KEYS[1]) ~= '' then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'r', ARGV[1])
return 1
"""
