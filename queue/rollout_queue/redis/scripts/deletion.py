"""Scripts that delete a session, and remove its entries from the streams."""

from rollout_queue.redis.scripts.functions import REMOVE_REFERENCES

DELETE = (
    REMOVE_REFERENCES
    + """
-- KEYS: session, stream, verdicts, deleted, deleting, sorted set…, user…, response…,
--       (image, sessions that show it)…, continuation…
-- ARGV: id, seen, tombstone, deletion, now, how many sorted sets, users, responses and images
-- `seen` is how many fields the session had when its tombstone was made.
if redis.call('HEXISTS', KEYS[4], ARGV[1]) == 1 then return 'deleted' end
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[2]) then return 'changed' end
local verdict = redis.call('HGET', KEYS[1], 'verdict')
-- This comes first and frees memory, so that a full Redis refuses none of the writes below.
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[4], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[5], ARGV[5], ARGV[1])
redis.call('XADD', KEYS[2], '*', 'r', ARGV[4])
redis.call('HINCRBY', KEYS[3], 'session:deleted', 1)
local code = verdict and string.match(verdict, '"code":"([^"]*)"')
if code then redis.call('HINCRBY', KEYS[3], 'session:' .. code, -1) end
remove_references(6, ARGV[6], ARGV[7], ARGV[8], ARGV[9])
return 'done'
"""
)

REMOVE_ENTRIES = r"""
-- KEYS: stream   ARGV: '', id of an entry…; or: first, count, schema, session id as MessagePack…
-- Removes the entries with these ids; or as follows.
-- Looks at `count` entries from `first` on and removes the records of these sessions, but not their Deletion.
-- Returns the last entry that it looked at; nothing at the end of the stream. In a record of this schema the
-- session id stands before any text of a client, so the first `session_id` is the field. Bytes that are no
-- record of this schema are removed if a field `session_id` in them has one of the ids. If they have no such
-- field, they are removed if they contain one of the ids of at least 16 characters.
if ARGV[1] == '' then
    -- bounded: KNOWN_AT_ONCE
    for at = 2, #ARGV do redis.call('XDEL', KEYS[1], ARGV[at]) end
    return
end
local sessions = {}
-- bounded: SESSIONS_AT_ONCE
for at = 4, #ARGV do sessions[ARGV[at]] = true end
local function named(record)
    local _, at = string.find(record, '\170session_id', 1, true)
    if not at then return nil end
    local head, size = string.byte(record, at + 1, at + 2)
    if head == 217 then return string.sub(record, at + 1, at + 2 + (size or 0)) end
    return string.sub(record, at + 1, at + 1 + (head or 160) - 160)
end
local function holds(bytes)
    local key = string.find(bytes, '\170session_id', 1, true) and '\170session_id' or ''
    -- bounded: SESSIONS_AT_ONCE
    for at = 4, #ARGV do
        local long = key ~= '' or #ARGV[at] > 16
        if long and string.find(bytes, key .. ARGV[at], 1, true) then return true end
    end
end
local function of_these(fields)
    local record = fields[1] == 'r' and fields[2] or table.concat(fields, ' ')
    local session = string.sub(record, 1, 1) == ARGV[3] and named(record)
    if not session then return holds(record) end
    return sessions[session] and string.sub(record, 3, 16) ~= '\164type\168deletion'
end
local entries = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])
for _, entry in ipairs(entries) do
    if of_these(entry[2]) then redis.call('XDEL', KEYS[1], entry[1]) end
end
return #entries == tonumber(ARGV[2]) and entries[#entries][1]
"""
