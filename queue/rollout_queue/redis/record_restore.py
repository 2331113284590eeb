"""Brings records back into the stream: a whole recorded session, and dead letters.

One script writes the whole session. So an import that is interrupted leaves no half-written session, which a
gateway might expire, and the next import can skip the sessions that exist.

Dead letters are appended again, once this build can read them:

weir:dead ─▶ is it a record? ─▶ does its session wait for it? ─▶ one script: append it, remove the letter

A trainer that is older than a gateway cannot read the gateway's records, and sets them aside. While their
sessions have no verdict, a newer trainer can still train them. A run that is killed may be repeated, because
one script moves each letter.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import msgspec
from redis import Redis

from rollout_queue import clock
from rollout_queue.contract.codec import decode, encode
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.export_rows import CLOSING, Episode
from rollout_queue.contract.head import user_digest
from rollout_queue.contract.records import Deletion
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import available
from rollout_queue.redis.lua import SETTLE, Argument, Script
from rollout_queue.redis.session_heads import verdict_code

SAME = "SAME"
"""Stands for a record of the stream with the same bytes as the session's field."""

RESTORE = Script[bytes](
    SETTLE
    + """
-- KEYS: session, stream, sessions, deadlines, verdicts, deleted, deleted users, settled, forgotten ids,
--       user…, sessions that show an image… [, group, members]
-- ARGV: id, spec, created, deadline, owner, size, verdict, verdict code, number of users, digest of user…,
--       number of images, group, (field, value, record for the stream: empty for none, SAME, or its bytes)…
local id, users = ARGV[1], tonumber(ARGV[9])
local images = tonumber(ARGV[10 + users])
local group = 10 + users + images
local function forgotten(name) return redis.call('ZSCORE', KEYS[9], name) end
if redis.call('HEXISTS', KEYS[6], id) == 1 then return 'deleted' end
for user = 1, users do
    if redis.call('SISMEMBER', KEYS[7], ARGV[9 + user]) == 1 then return 'deleted' end
end
if redis.call('EXISTS', KEYS[1]) == 1 then return 'exists' end
if forgotten('s:' .. id) then return 'forgotten' end
if KEYS[group] then
    local size, owner = unpack(redis.call('HMGET', KEYS[group], 'size', 'owner'))
    if not owner and forgotten('g:' .. ARGV[11 + users]) then return 'forgotten' end
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
for set = 10, 9 + users + images do redis.call('SADD', KEYS[set], id) end
for index = 12 + users, #ARGV, 3 do -- bounded: one session
    redis.call('HSET', KEYS[1], ARGV[index], ARGV[index + 1])
    local record = ARGV[index + 2]
    if record == 'SAME' then record = ARGV[index + 1] end
    if record ~= '' then
        redis.call('HSET', KEYS[1], 'e:' .. redis.call('XADD', KEYS[2], '*', 'r', record), '')
    end
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


Restored = Literal["restored", "exists", "deleted", "forgotten", "owner", "size", "full"]
"""The result: every value but `restored` means that nothing was written."""


def restore(redis: Redis, episode: Episode) -> Restored:
    """Write the session, unless one with its id exists or existed. Raises StorageUnavailable.

    Its time to live starts now, so that it can still be rewarded.
    """
    spec, verdict = episode.spec, episode.verdict
    users = _users(episode)
    arguments: list[Argument] = [
        spec.session_id,
        encode(spec),
        spec.created_at,
        clock.now() + spec.ttl_s,
        spec.owner,
        "" if spec.group_size is None else str(spec.group_size),
        b"" if verdict is None else msgspec.json.encode(verdict),
        "" if verdict is None else verdict.code,
        len(users),
        *map(user_digest, users),
        len(_images(episode)),
        spec.group_id or "",
        *_fields(episode),
    ]
    return cast(Restored, RESTORE.run_now(redis, _names(episode), arguments).decode())


def _users(episode: Episode) -> list[str]:
    """The users whose data the session holds, sorted."""
    return sorted({user for user in (episode.spec.user, *(turn.user for turn in episode.turns)) if user})


def _images(episode: Episode) -> list[str]:
    """The hashes of the images that its turns show, sorted. Their bytes stay in Redis for it, if they are
    there."""
    return sorted({image.sha256 for turn in episode.turns for image in turn.images})


def _names(episode: Episode) -> list[str]:
    spec = episode.spec
    named: list[str] = [key_names.session(spec.session_id), key_names.STREAM, key_names.SESSIONS]
    named += [key_names.DEADLINES, key_names.VERDICTS]
    named += [key_names.DELETED, key_names.DELETED_USERS, key_names.SETTLED, key_names.FORGOTTEN_IDS]
    named += map(key_names.user_sessions, _users(episode))
    named += map(key_names.image_sessions, _images(episode))
    if spec.group_id is not None:
        named += [key_names.group(spec.group_id), key_names.group_members(spec.group_id)]
    return named


def _fields(episode: Episode) -> list[Argument]:
    """Three items for each field of the session's hash: its name, its value, and the record for the stream.

    The record of the outcome gets the present time, because a trainer waits `group_wait_s` from that time for
    further members of the group. With the old time it would not wait at all.
    """
    fields: list[Argument] = []
    for turn in episode.turns:
        fields += [f"t:{turn.turn_id}", encode(turn), SAME]
        if turn.last_attempt and turn.request_digest:
            fields += [f"q:{turn.request_digest}", b"", b""]
    for reward in episode.rewards:
        fields += [f"r:{reward.key}", encode(reward), SAME]
    if episode.outcome is not None:
        ended = msgspec.structs.replace(episode.outcome, created_at=clock.now())
        fields += ["outcome", encode(episode.outcome), encode(ended)]
    return fields


PAGE = 50
"""How many letters are read at once. Redis serves nobody else meanwhile."""
MOVE = Script[int]("""
-- KEYS: dead letters, stream, session   ARGV: letter, record
-- Appends the record, and removes its letter. Returns 0 if the letter or its session is gone.
if redis.call('EXISTS', KEYS[3]) == 0 then return 0 end
if not redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1] then return 0 end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
return redis.call('XDEL', KEYS[1], ARGV[1])
""")

Fate = Literal["requeued", "unreadable", "decided", "gone"]
"""unreadable: not by this build. decided: its session has its verdict. gone: its session was deleted or
forgotten."""


class Letter(NamedTuple):
    """A dead letter, and what becomes of it."""

    letter_id: bytes
    fate: Fate
    packed: bytes = b""
    why: str = ""
    """Why it cannot be read."""
    needs: key_names.Key = key_names.DELETED
    """Without this key, it is not appended: that of its session."""


def requeue(redis: Redis, *, dry_run: bool = False, discard: bool = False) -> Iterator[Letter]:
    """Append what this build can read, in the order in which it was set aside; yield each letter.

    With `discard`, letters that cannot be trained any more are removed: those whose session has its verdict,
    or is gone. With `dry_run`, nothing is changed. Raises StorageUnavailable. `redis` returns bytes.
    """
    for letter in _letters(redis):
        if letter.fate == "requeued" and not dry_run:
            named = [key_names.DEAD_LETTERS, key_names.STREAM, letter.needs]
            if not MOVE.run_now(redis, named, [letter.letter_id, letter.packed]):
                continue  # another run has moved it, or its session was just deleted
        if discard and letter.fate in ("decided", "gone") and not dry_run:
            with available():
                redis.xdel(key_names.DEAD_LETTERS, letter.letter_id)
        yield letter


def _letters(redis: Redis) -> Iterator[Letter]:
    """All that are there now, the oldest first. What a trainer sets aside meanwhile is for the next run."""
    with available():
        newest: Any = redis.xrevrange(key_names.DEAD_LETTERS, count=1)
    start, end = "-", newest[0][0] if newest else "-"
    while page := _page(redis, start, end):
        start = f"({page[-1][0].decode()}"
        for letter_id, fields in page:
            yield _judged(redis, letter_id, fields.get(key_names.STREAM_FIELD, b""))


def _page(redis: Redis, start: str, end: bytes | str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    with available():
        found: Any = redis.xrange(key_names.DEAD_LETTERS, start, end, PAGE)
    return list(found)


def _judged(redis: Redis, letter_id: bytes, packed: bytes) -> Letter:
    try:
        record = decode(packed)
    except (InvalidRecord, UnknownSchema) as error:
        return Letter(letter_id, "unreadable", why=str(error))
    if isinstance(record, Deletion):
        return Letter(letter_id, "requeued", packed)
    session = key_names.session(record.session_id)
    with available():
        found: Any = redis.hmget(session, "spec", "verdict")
    spec, verdict = found
    if spec is None:
        return Letter(letter_id, "gone")
    if verdict is not None and verdict_code(record.session_id, verdict) not in CLOSING:
        return Letter(letter_id, "decided")
    return Letter(letter_id, "requeued", packed, needs=session)
