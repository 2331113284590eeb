"""Deletes sessions, and all data of a user, permanently.

1. One script replaces the session's head, response texts, continuations and the images that no other session
   shows by a tombstone, and appends a Deletion to the stream.
2. The session's entries are removed from the stream, by the ids that the head has of them, and from the dead
   letters, page by page. Any gateway may finish this: without the head, it looks at the whole stream.
"""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.codec import SCHEMA, encode
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.head import (
    DeletionTotals,
    SessionHead,
    Tombstone,
    deletion_totals,
    encode_tombstone,
    tombstone_of,
    user_digest,
)
from rollout_queue.contract.records import Deletion, SessionSpec
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.lua import REMOVE_REFERENCES, Argument, Script
from rollout_queue.redis.session_heads import UNREADABLE, read_head
from rollout_queue.redis.turn_store import continuations_of, images_of

logger = logging.getLogger(__name__)


DELETE = Script[bytes](
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

REMOVE_ENTRIES = Script[bytes | None](r"""
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
""")


KNOWN_AT_ONCE = 1000
"""Entries that one script removes by their ids."""
PAGE = 100
"""Entries per script. Redis serves nobody else while a script runs."""
OVERDUE_S = 30.0
"""A deletion that is unfinished after this time is finished by any gateway."""
SESSIONS_AT_ONCE = 1000
IMAGE_HASH = re.compile(rb"\xd9\x40([0-9a-f]{64})")
"""The SHA-256 of an image in the bytes of a record: a text of 64 characters in MessagePack."""


class ReplacedSession(NamedTuple):
    """A session that has become a tombstone."""

    tombstone: Tombstone
    entries: Sequence[str] | None
    """The ids of its entries in the stream; None if its head did not have them all, as of an older build."""


class StreamDeleter:
    """Every method may raise StorageUnavailable, and may be repeated then. `redis` returns bytes
    (decode_responses off)."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def delete_session(self, session_id: str) -> Tombstone | None:
        """Remove everything that is stored of the session, and append a Deletion for the trainer.

        Returns the tombstone. None if no such session exists, or another call has just deleted it.
        """
        deleted = await self._replace_by_tombstone(session_id)
        if deleted is None:
            return None
        await self._try_to_remove_entries([deleted])
        return deleted.tombstone

    async def delete_user(self, user: str) -> DeletionTotals:
        # From here on no data is accepted for this name, so the sessions found next are all there are.
        """Delete the user's sessions, and refuse new data for that name from now on."""
        await stored(self._redis.sadd(key_names.DELETED_USERS, user_digest(user)))
        sessions, totals = key_names.user_sessions(user), DeletionTotals()
        names: Collection[bytes]
        while names := await stored(self._redis.srandmember(sessions, SESSIONS_AT_ONCE)):
            replaced = [await self._replace_by_tombstone(name.decode()) for name in sorted(names)]
            deleted = [each for each in replaced if each is not None]
            # bounded: SESSIONS_AT_ONCE
            await stored(self._redis.srem(sessions, *names))
            await self._try_to_remove_entries(deleted)
            totals += deletion_totals([each.tombstone for each in deleted])
        return totals

    async def finish(self, now: float) -> int:
        """Finish deletions that another process left unfinished. Returns the number of sessions."""
        overdue: list[bytes] = await stored(
            self._redis.zrange(
                key_names.DELETING, "-inf", now - OVERDUE_S, byscore=True, offset=0, num=SESSIONS_AT_ONCE
            )
        )
        if overdue:
            names = [name.decode() for name in overdue]
            await self._remove_entries(names, names)
        return len(overdue)

    async def _replace_by_tombstone(self, session_id: str) -> ReplacedSession | None:
        """Delete everything of the session except its entries in the streams. None if there is no session."""
        key = key_names.session(session_id)
        while True:
            # bounded: one session
            fields: dict[bytes, bytes] = await stored(self._redis.hgetall(key))
            if b"spec" not in fields:
                return None
            head = _readable_part(fields) or await self._minimal_head(session_id)
            tombstone = _tombstone(head, fields)
            match await DELETE.run(self._redis, *_deletion(head, tombstone, fields)):
                case b"done":
                    return ReplacedSession(tombstone, _entries_of(head, fields))
                case b"deleted":
                    return None

    async def _minimal_head(self, session_id: str) -> SessionHead:
        """The head of a session whose spec cannot be read: its id and its time of creation."""
        created_at = await stored(self._redis.zscore(key_names.SESSIONS, session_id))
        return SessionHead(spec=SessionSpec(session_id=session_id, created_at=created_at or 0.0))

    async def _try_to_remove_entries(self, deleted: Collection[ReplacedSession]) -> None:
        """Remove entries of deleted sessions. If Redis fails, this raises nothing and `finish` does it later:
        the session itself is deleted, and the caller has to report that."""
        names = [each.tombstone.session_id for each in deleted]
        searched = [each.tombstone.session_id for each in deleted if each.entries is None]
        known = [entry for each in deleted for entry in each.entries or ()]
        try:
            for at in range(0, len(known), KNOWN_AT_ONCE):
                page: list[Argument] = [b"", *known[at : at + KNOWN_AT_ONCE]]
                await REMOVE_ENTRIES.run(self._redis, [key_names.STREAM], page)
            await self._remove_entries(names, searched)
        except StorageUnavailable as error:
            logger.warning("the entries of %d deleted sessions will be removed later: %s", len(names), error)

    async def _remove_entries(self, session_ids: Collection[str], searched: Collection[str]) -> None:
        """Remove the entries of deleted sessions from the dead letters, and those of the sessions that are
        `searched` from the stream, too. These sessions get no new entries.

        The dead letters come last, because the trainer moves entries there from the stream.
        """
        streams = ((key_names.STREAM, bytes([SCHEMA]), searched), (key_names.DEAD_LETTERS, b"", session_ids))
        for stream, schema, sought in streams:
            packed = [msgspec.msgpack.encode(session_id) for session_id in sought]
            if not packed or not await stored(self._redis.exists(stream)):
                continue
            first: bytes | None = b"-"
            while first is not None:
                last = await REMOVE_ENTRIES.run(self._redis, [stream], [first, PAGE, schema, *packed])
                first = None if last is None else b"(" + last
        if session_ids:
            # bounded: SESSIONS_AT_ONCE
            await stored(self._redis.zrem(key_names.DELETING, *session_ids))


def _readable_part(fields: Mapping[bytes, bytes]) -> SessionHead | None:
    """The whole head, else one of the spec alone; None if this build can read neither."""
    for part in (fields, {b"spec": fields[b"spec"]}):
        with suppress(*UNREADABLE):
            return read_head(part)
    return None


def _entries_of(head: SessionHead, fields: Mapping[bytes, bytes]) -> Sequence[str] | None:
    """The ids of all entries of the session; None if they are not known."""
    entries = [name[2:].decode() for name in fields if name.startswith(b"e:")]
    turns = sum(name.startswith(b"t:") for name in fields)
    rewards = sum(name.startswith(b"r:") for name in fields) - sum(reward.late for reward in head.rewards)
    records = turns + rewards + (b"outcome" in fields) + (b"joined" in fields)
    return entries if entries and len(entries) >= records else None


def _tombstone(head: SessionHead, fields: Mapping[bytes, bytes]) -> Tombstone:
    turns = sum(name.startswith(b"t:") for name in fields)
    rewards = sum(name.startswith(b"r:") for name in fields)
    return tombstone_of(head, turns, rewards, clock.now())


def _deletion(
    head: SessionHead, tombstone: Tombstone, fields: Mapping[bytes, bytes]
) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of DELETE. `fields` are those of the session's hash."""
    spec = head.spec
    unread = () if head.turns else _hashes_in(fields)
    traces, numbers = traces_of(head, unread)
    named: list[str] = [key_names.session(spec.session_id), key_names.STREAM, key_names.VERDICTS]
    named += [key_names.DELETED, key_names.DELETING, *traces]
    record = Deletion(
        session_id=spec.session_id,
        created_at=tombstone.deleted_at,
        group_id=spec.group_id,
        group_size=spec.group_size,
    )
    arguments: list[Argument] = [spec.session_id, len(fields), encode_tombstone(tombstone)]
    arguments += [encode(record), tombstone.deleted_at, *numbers]
    return named, arguments


def _hashes_in(fields: Mapping[bytes, bytes]) -> set[str]:
    """What may be hashes of images in turns that this build cannot read. Only an image that no other session
    shows is removed, so a text that looks like a hash does no harm."""
    turns = [value for name, value in fields.items() if name.startswith(b"t:")]
    return {found.decode() for turn in turns for found in IMAGE_HASH.findall(turn)}


def traces_of(head: SessionHead, more_images: Collection[str] = ()) -> tuple[list[str], list[int]]:
    """The other keys that refer to a session: sorted sets, sets of users, responses, two for each image, then
    continuations.

    The numbers say how many there are of each of the first four kinds. `more_images` are hashes of images
    beside those of the head.
    """
    owner = head.spec.owner
    sorted_sets = [key_names.DEADLINES, key_names.SETTLED, key_names.OPEN, key_names.open_of(owner)]
    sorted_sets += [key_names.UNTRAINED, key_names.TRAINED]
    users = [key_names.user_sessions(user) for user in head.users]
    responses = [key_names.response(name) for name in sorted({turn.completion_id for turn in head.turns})]
    continuations = [key for turn in head.turns for key in continuations_of(turn, owner)]
    images = sorted({image.sha256 for turn in head.turns for image in turn.images} | set(more_images))
    numbers = [len(sorted_sets), len(users), len(responses), len(images)]
    return [*sorted_sets, *users, *responses, *images_of(images), *continuations], numbers
