"""Scripts that append a turn, a reward or an outcome to the stream and to its session.

A caller that has received no answer may repeat any of them.
"""

from rollout_queue.contract.errors import MOST_REWARDS
from rollout_queue.contract.rewards import LARGEST_REWARD
from rollout_queue.redis.scripts.functions import SETTLE

APPEND_TURN = """
local function with_turn(sums, tokens, finished, first, last)
    -- The sums of a session's turns (`contract/turn_parts/sums.py`) after one more turn.
    local turns, sampled, ended, oldest, newest =
        string.match(sums or '', '^(%d+) (%d+) (%S+) (%S+) (%S+)$')
    if not turns then turns, sampled, ended, oldest, newest = 0, 0, finished, first, last end
    if tonumber(ended) < tonumber(finished) then ended = finished end
    if oldest == '-' or first ~= '-' and tonumber(first) < tonumber(oldest) then oldest = first end
    if newest == '-' or last ~= '-' and tonumber(last) > tonumber(newest) then newest = last end
    return string.format('%d %d %s %s %s', turns + 1, sampled + tokens, ended, oldest, newest)
end
-- KEYS: session, stream, deadlines, sessions, deleted, deleted users, forgotten ids, user…,
--       (image, sessions that show it)…, continuation…
-- ARGV: id, field, turn, expires, ttl in ms, request, seen, spec, created, deadline, finished, longest ttl in
--       ms, output tokens, their oldest and newest version, number of users, digest of user…, number of
--       images, bytes of image…
-- `spec` opens a session that does not exist; empty if the session must exist.
-- `request` names a field that exists once a retry of the turn's request was recorded. `seen` is how many
-- fields the session had when the turn's relation to other attempts was computed; empty if it was not
-- computed. After `deadline`, in ms by Redis' clock, nothing is stored, because the client may have been told
-- that the call failed. If the session got another time to live after the call began, that one counts.
-- Returns how many fields the session had before and has now; or a word that says why nothing was appended.
local known = redis.call('HMGET', KEYS[1], ARGV[2], 'spec', 'outcome', ARGV[6], 'ttl', 'beat', 'turns')
local stored, spec, outcome, retried, ttl, beat, sums = unpack(known)
local before = redis.call('HLEN', KEYS[1])
if stored then return {before, before} end
if not spec then
    if redis.call('HEXISTS', KEYS[5], ARGV[1]) == 1 then return 'deleted' end
    if ARGV[8] == '' then return 'unknown' end
    if redis.call('ZSCORE', KEYS[7], 's:' .. ARGV[1]) then return 'forgotten' end
end
if outcome then return 'closed' end
local time = redis.call('TIME')
if time[1] * 1000 + time[2] / 1000 > tonumber(ARGV[10]) then return 'late' end
local users = tonumber(ARGV[16])
for user = 1, users do
    if redis.call('SISMEMBER', KEYS[6], ARGV[16 + user]) == 1 then return 'user deleted' end
end
local expires, ttl_ms = ARGV[4], ARGV[5]
if ttl then
    local finished = tonumber(ARGV[11])
    local expiry = math.max(finished, tonumber(beat)) + ttl
    expires = string.format('%.17g', expiry)
    local lives_ms = math.floor((expiry - finished) * 1000)
    ttl_ms = string.format('%.0f', math.max(1, math.min(lives_ms, tonumber(ARGV[12]))))
end
local looked = ARGV[7] ~= ''
if looked and before ~= tonumber(ARGV[7]) then return 'retried' end
if retried and not looked then return 'retried' end
if not spec then redis.call('ZADD', KEYS[4], ARGV[9], ARGV[1]) end
redis.call('ZADD', KEYS[3], expires, ARGV[1])
for user = 1, users do redis.call('SADD', KEYS[7 + user], ARGV[1]) end
local images = tonumber(ARGV[17 + users])
for image = 1, images do
    local key, bytes = 6 + users + 2 * image, ARGV[17 + users + image]
    if bytes ~= '' then redis.call('SET', KEYS[key], bytes, 'NX') end
    redis.call('SADD', KEYS[key + 1], ARGV[1])
end
for continuation = 8 + users + 2 * images, #KEYS do -- bounded: one turn
    redis.call('SET', KEYS[continuation], ARGV[1], 'PX', ttl_ms)
end
-- The turn comes last: if another program's value under one of the keys ends the script, it is repeated.
local entry = redis.call('XADD', KEYS[2], '*', 'r', ARGV[3])
if not spec then redis.call('HSET', KEYS[1], 'spec', ARGV[8]) end
sums = with_turn(sums, ARGV[13], ARGV[11], ARGV[14], ARGV[15])
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3], 'turns', sums, 'e:' .. entry, '')
if looked then redis.call('HSET', KEYS[1], ARGV[6], '') end
return {before, redis.call('HLEN', KEYS[1])}
"""

RETRACT = """
-- KEYS: session, stream   ARGV: field, field of the retraction, retraction, deadline
-- Appends the retraction of the turn if the turn is stored. Until `deadline` a turn that is not stored may
-- still be.
-- Returns a word that says what became of the turn.
local turn, retraction, verdict = unpack(redis.call('HMGET', KEYS[1], ARGV[1], ARGV[2], 'verdict'))
if not turn then
    local time = redis.call('TIME')
    return time[1] * 1000 + time[2] / 1000 <= tonumber(ARGV[4]) and 'early' or 'absent'
end
if retraction then return 'retracted' end
if verdict then return 'decided' end
local entry = redis.call('XADD', KEYS[2], '*', 'r', ARGV[3])
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3], 'e:' .. entry, '')
return 'retracted'
"""

WITHIN = f"""
local function within(session, value)
    -- Returns the sum of the magnitudes of the session's rewards and of `value`, and how many these are, as
    -- text; or nothing, and a word that says why it takes no further reward. A session of an older build has
    -- no field `magnitude`, or one without the number, so its rewards are added up here.
    local sum, count = string.match(redis.call('HGET', session, 'magnitude') or '', '^(%S+) (%d+)$')
    if not sum then
        sum, count = 0, 0
        for _, field in ipairs(redis.call('HKEYS', session)) do -- bounded: one session
            if string.sub(field, 1, 2) == 'r:' then
                count = count + 1
                local packed = redis.call('HGET', session, field)
                local readable, reward = pcall(cmsgpack.unpack, string.sub(packed, 2))
                if readable and type(reward) == 'table' then
                    sum = sum + math.abs(tonumber(reward['value']) or 0)
                end
            end
        end
    end
    sum, count = sum + math.abs(tonumber(value)), count + 1
    if count > {MOST_REWARDS} then return nil, 'too many' end
    if not (sum <= {LARGEST_REWARD!r}) then return nil, 'too large' end
    return string.format('%.17g %d', sum, count)
end
"""

APPEND_REWARD = (
    WITHIN
    + """
-- KEYS: session, stream, deleted   ARGV: id, field, reward, late reward, value
-- Returns the stored reward; or, in a list, a word that says why there is none.
local stored, verdict, spec = unpack(redis.call('HMGET', KEYS[1], ARGV[2], 'verdict', 'spec'))
if not spec then return {redis.call('HEXISTS', KEYS[3], ARGV[1]) == 1 and 'deleted' or 'unknown'} end
if stored then return stored end
local sum, refusal = within(KEYS[1], ARGV[5])
if not sum then return {refusal} end
local reward = ARGV[3]
if verdict then reward = ARGV[4]
else redis.call('HSET', KEYS[1], 'e:' .. redis.call('XADD', KEYS[2], '*', 'r', reward), '') end
redis.call('HSET', KEYS[1], ARGV[2], reward, 'magnitude', sum)
return reward
"""
)

APPEND_OUTCOME = (
    SETTLE
    + WITHIN
    + """
-- KEYS: session, stream, deadlines, verdicts, deleted, settled
-- ARGV: id, outcome, reward field, reward, verdict, verdict code, value of the reward, terms of the outcome
-- Returns the stored outcome; or, in a list, a word that says why there is none. If the word is 'described',
-- the session was described after the caller had read it; its spec comes then, too.
local stored, spec, terms = unpack(redis.call('HMGET', KEYS[1], 'outcome', 'spec', 'terms'))
if not spec then return {redis.call('HEXISTS', KEYS[5], ARGV[1]) == 1 and 'deleted' or 'unknown'} end
if stored then return stored end
if terms and terms ~= ARGV[8] then return {'described', spec} end
if ARGV[3] ~= '' and redis.call('HEXISTS', KEYS[1], ARGV[3]) == 0 then
    local sum, refusal = within(KEYS[1], ARGV[7])
    if not sum then return {refusal} end
    local entry = redis.call('XADD', KEYS[2], '*', 'r', ARGV[4])
    redis.call('HSET', KEYS[1], ARGV[3], ARGV[4], 'magnitude', sum, 'e:' .. entry, '')
end
local entry = redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
redis.call('HSET', KEYS[1], 'outcome', ARGV[2], 'e:' .. entry, '')
if ARGV[5] ~= '' then
    redis.call('HSET', KEYS[1], 'verdict', ARGV[5])
    redis.call('HINCRBY', KEYS[4], 'session:' .. ARGV[6], 1)
    redis.call('ZREM', KEYS[3], ARGV[1])
    settle(KEYS[6], KEYS[2], ARGV[1])
end
return ARGV[2]
"""
)
