"""Writes a whole session that was recorded elsewhere, or earlier: for replays, and after a loss.

One script, not the gateways' appends one after another: an import that dies leaves whole sessions or nothing,
so that what is there can be passed over the next time; and no gateway expires one half written.
"""

import time
from typing import Any, Literal

import msgspec
from redis import Redis

from rollout_queue.contract.codec import encode
from rollout_queue.contract.episodes import Episode
from rollout_queue.contract.tombstone import user_digest
from rollout_queue.redis import keys
from rollout_queue.redis.availability import available
from rollout_queue.redis.scripts import writing as redis_scripts

Restored = Literal["restored", "exists", "deleted", "forgotten", "owner", "size", "full"]
"""What became of it: everything but `restored` left Redis as it was."""

SAME = "SAME"

RESTORE = (
    redis_scripts.SETTLE
    + """
-- KEYS: session, stream, sessions, deadlines, verdicts, deleted, deleted users, settled, forgotten ids, user…
--       [, group, members]
-- ARGV: id, spec, created, deadline, owner, size, verdict, verdict code, number of users, digest of user…,
--       group, (field, value, what the stream gets: nothing, SAME, or other bytes)…
local id, users = ARGV[1], tonumber(ARGV[9])
local group = 10 + users
local function forgotten(name) return redis.call('ZSCORE', KEYS[9], name) end
if redis.call('HEXISTS', KEYS[6], id) == 1 then return 'deleted' end
for user = 1, users do
    if redis.call('SISMEMBER', KEYS[7], ARGV[9 + user]) == 1 then return 'deleted' end
end
if redis.call('EXISTS', KEYS[1]) == 1 then return 'exists' end
if forgotten('s:' .. id) then return 'forgotten' end
if KEYS[group] then
    local size, owner = unpack(redis.call('HMGET', KEYS[group], 'size', 'owner'))
    if not owner and forgotten('g:' .. ARGV[group]) then return 'forgotten' end
    if owner and owner ~= ARGV[5] then return 'owner' end
    if not size or size == '' then size = ARGV[6] end
    if ARGV[6] ~= '' and size ~= ARGV[6] then return 'size' end
    if size ~= '' and redis.call('SCARD', KEYS[group + 1]) >= tonumber(size)
        and redis.call('SISMEMBER', KEYS[group + 1], id) == 0 then return 'full' end
    redis.call('HSET', KEYS[group], 'size', size, 'owner', ARGV[5])
    redis.call('SADD', KEYS[group + 1], id)
end
redis.call('HSET', KEYS[1], 'spec', ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[3], id)
for user = 1, users do redis.call('SADD', KEYS[9 + user], id) end
for index = 11 + users, #ARGV, 3 do
    redis.call('HSET', KEYS[1], ARGV[index], ARGV[index + 1])
    local record = ARGV[index + 2]
    if record == 'SAME' then record = ARGV[index + 1] end
    if record ~= '' then redis.call('XADD', KEYS[2], '*', 'r', record) end
end
if ARGV[8] == '' then
    redis.call('ZADD', KEYS[4], ARGV[4], id)
else
    redis.call('HSET', KEYS[1], 'verdict', ARGV[7])
    redis.call('HINCRBY', KEYS[5], 'session:' .. ARGV[8], 1)
    settle(KEYS[8], KEYS[2], id)
end
return 'restored'
"""
)


def restore(redis: Redis, episode: Episode) -> Restored:
    """Write the session, unless one of its id is, or was, there. Raises StorageUnavailable.

    Its time to live begins anew: who replays old data may still reward it.
    """
    spec, verdict = episode.spec, episode.verdict
    users = _users(episode)
    arguments: list[str | bytes | float] = [
        spec.session_id,
        encode(spec),
        spec.created_at,
        time.time() + spec.ttl_s,
        spec.owner,
        "" if spec.group_size is None else str(spec.group_size),
        b"" if verdict is None else msgspec.json.encode(verdict),
        "" if verdict is None else verdict.code,
        len(users),
        *map(user_digest, users),
        spec.group_id or "",
        *_fields(episode),
    ]
    script = redis.register_script(RESTORE)
    with available():
        reply: Any = script(_names(episode), arguments)
    restored: Restored = reply.decode()
    return restored


def _users(episode: Episode) -> list[str]:
    """Everybody whose data it holds."""
    return sorted({user for user in (episode.spec.user, *(turn.user for turn in episode.turns)) if user})


def _names(episode: Episode) -> list[str]:
    spec = episode.spec
    named = [keys.session(spec.session_id), keys.STREAM, keys.SESSIONS, keys.DEADLINES, keys.VERDICTS]
    named += [keys.DELETED, keys.DELETED_USERS, keys.SETTLED, keys.FORGOTTEN_IDS]
    named += map(keys.user_sessions, _users(episode))
    if spec.group_id is not None:
        named += [keys.group(spec.group_id), keys.group_members(spec.group_id)]
    return named


def _fields(episode: Episode) -> list[str | bytes | float]:
    """The fields of the session's hash, and what the stream gets of each, in its order.

    In the stream, the session has ended now: a trainer that finds the first member of a group is to wait for
    the next one as long as ever, and not to think that the group has been silent for a year.
    """
    fields: list[str | bytes | float] = []
    for turn in episode.turns:
        fields += [f"t:{turn.turn_id}", encode(turn), SAME]
        if turn.last_attempt and turn.request_digest:
            fields += [f"q:{turn.request_digest}", b"", b""]
    for reward in episode.rewards:
        fields += [f"r:{reward.key}", encode(reward), SAME]
    if episode.outcome is not None:
        ended = msgspec.structs.replace(episode.outcome, created_at=time.time())
        fields += ["outcome", encode(episode.outcome), encode(ended)]
    return fields
