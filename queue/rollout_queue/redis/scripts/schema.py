"""The script by which a release notes its schema."""

CLAIM_SCHEMA = """
-- KEYS: schema   ARGV: the schema of this release
-- Returns what is stored; this release's schema if that was none or older.
local found = redis.call('GET', KEYS[1])
if not found or (tonumber(found) and tonumber(found) < tonumber(ARGV[1])) then
    redis.pcall('SET', KEYS[1], ARGV[1]) -- a full Redis refuses it, and the next start repeats it
    return ARGV[1]
end
return found
"""
