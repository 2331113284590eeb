"""Script of the promises of samples."""

CANCEL = """
-- KEYS: result, announcements   ARGV: promise, what its polls get from now on, seconds to live
-- Ends a promise whose sample is being made, and tells its maker. What is made already stays. Returns whether
-- it has ended.
if redis.call('GET', KEYS[1]) ~= '' then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'r', ARGV[1])
return 1
"""
