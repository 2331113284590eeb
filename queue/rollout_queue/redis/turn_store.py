"""The scripts that append a turn, a reward or an outcome to the stream and to its session, and retract a
turn; `stream_writer.py` runs them.

A caller that has received no answer may repeat any of the scripts. A turn whose append Redis did not answer
is retracted, because its client got an error:

append ──▶ no answer ──▶ pending ──retract──▶ stored: a retraction is appended ──▶ the client gets an error
                                        └──▶ not stored: it may still be ──▶ the client gets an error
                                             tried again until the deadline of the append ◀──┘

A retraction is an aborted turn that replaces the stored one, as a retry would. So the stored turn is an
orphan for every trainer, also for one of an older build.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.codec import encode
from rollout_queue.contract.errors import MOST_REWARDS, StorageUnavailable
from rollout_queue.contract.head import NONE, user_digest
from rollout_queue.contract.outcomes import LARGEST_REWARD, retraction_id
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import SessionSpec, Turn
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.lua import SETTLE, Argument, Confirm, Script

logger = logging.getLogger(__name__)


APPEND_TURN = Script[bytes | list[int]]("""
local function with_turn(sums, tokens, finished, first, last)
    -- The sums of a session's turns (`TurnSums`) after one more turn.
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
""")

RETRACT = Script[bytes]("""
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
""")

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

APPEND_REWARD = Script[bytes | list[bytes]](
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

APPEND_OUTCOME = Script[bytes | list[bytes]](
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


CONTINUATION_TTL_S = 30 * 86400.0
"""The longest lifetime of a continuation key; a longer one could overflow Redis' count of milliseconds."""

_FIXED_KEYS = (
    *(key_names.STREAM, key_names.DEADLINES, key_names.SESSIONS),
    *(key_names.DELETED, key_names.DELETED_USERS, key_names.FORGOTTEN_IDS),
)


def append_arguments(
    turn: Turn,
    expires_at: float,
    owner: str,
    seen: int | None,
    opening: SessionSpec | None,
    deadline_ms: int,
    images: Mapping[str, bytes],
) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of APPEND_TURN. Numbers are
    passed as text, which hiredis packs in half the time."""
    users = _users_of(turn, opening)
    named: list[str] = [key_names.session(turn.session_id), *_FIXED_KEYS]
    named += map(key_names.user_sessions, users)
    shown = sorted({image.sha256 for image in turn.images})
    if shown:
        named += images_of(shown)
    named += continuations_of(turn, owner)
    versions = [span.version for span in turn.versions]
    oldest, newest = (str(min(versions)), str(max(versions))) if versions else (NONE, NONE)
    ttl_s = min(max(expires_at - turn.finished_at, 0.001), CONTINUATION_TTL_S)
    return named, [
        turn.session_id,
        f"t:{turn.turn_id}",
        encode(turn),
        repr(expires_at),
        str(int(ttl_s * 1000)),
        f"q:{turn.request_digest}",
        "" if seen is None else str(seen),
        "" if opening is None else encode(opening),
        "" if opening is None else repr(opening.created_at),
        str(deadline_ms),
        repr(turn.finished_at),
        str(int(CONTINUATION_TTL_S * 1000)),
        str(len(turn.output_ids)),
        oldest,
        newest,
        str(len(users)),
        *map(user_digest, users),
        str(len(shown)),
        *[images.get(sha256, b"") for sha256 in shown],
    ]


def _users_of(turn: Turn, opening: SessionSpec | None) -> list[str]:
    """The user of the turn, and the one of the session that is opened with it."""
    if opening is None:
        return [turn.user] if turn.user else []
    return sorted({user for user in (turn.user, opening.user) if user})


def images_of(hashes: Iterable[str]) -> list[str]:
    """For each image the key of its bytes, and that of the sessions that show it."""
    return [key for sha256 in hashes for key in (key_names.image(sha256), key_names.image_sessions(sha256))]


def continuations_of(turn: Turn, owner: str) -> list[str]:
    """The keys by which a later call of `owner` finds the session of this turn."""
    return [key_names.continuation(owner, digest) for digest in turn.continuation_digests]


AT_ONCE_S = 1.0
"""How long a client waits for the retraction before it gets its error. Often Redis takes it, because only a
connection was lost, or replicas are late. Then it is there even if this process ends at once."""
AGAIN_S = 0.1
"""How often a process that ends tries to retract."""
MOST_PENDING = 10_000
"""Turns that may be pending at once. Each call that ends while Redis does not answer may add one."""


class PendingRetraction(NamedTuple):
    """The retraction to append if the turn is stored; and the last moment to store it, by Redis' clock."""

    retraction: Turn
    deadline_ms: int


class Retractions:
    """The turns of this process that are still to be retracted, by turn id."""

    def __init__(self, redis: Redis, confirm: Confirm | None) -> None:
        """`confirm` is None if no replica is waited for."""
        self._redis, self._confirm = redis, confirm
        self._pending: dict[str, PendingRetraction] = {}
        self._one_at_a_time = asyncio.Lock()

    def add(self, turn: Turn, deadline_ms: int) -> None:
        """Note that the append of the turn was not answered."""
        if len(self._pending) >= MOST_PENDING:
            logger.error("turn %s may be stored, although its client was told that it failed", turn.turn_id)
            return
        self._pending[turn.turn_id] = PendingRetraction(_retraction_of(turn), deadline_ms)

    async def settle_at_once(self, turn_id: str) -> None:
        """Retract the turn, with all others, if that is possible now."""
        with suppress(StorageUnavailable, TimeoutError):
            async with clock.real_timeout(AT_ONCE_S), self._one_at_a_time:
                if turn_id in self._pending:
                    await self._settle(list(self._pending))

    async def close(self, within_s: float) -> None:
        """Retract all pending turns, or wait until none of them can be stored any more."""
        with suppress(TimeoutError):
            async with clock.real_timeout(within_s):
                while self._pending:
                    with suppress(StorageUnavailable):
                        await self.settle_all()
                    if self._pending:
                        await clock.sleep(AGAIN_S)
        if self._pending:
            named = ", ".join(self._pending)
            logger.error("turns %s may be stored, although their clients were told that they failed", named)

    async def settle(self, session_id: str) -> None:
        """Retract the pending turns of one session. Raises StorageUnavailable if that is not possible yet."""
        await self._settle([name for name, each in self._pending.items() if _belongs(each, session_id)])
        if any(_belongs(each, session_id) for each in self._pending.values()):
            raise StorageUnavailable(f"Redis may still store a failed turn of session {session_id}")

    async def settle_all(self) -> None:
        """Retract all pending turns whose deadline has passed. Raises StorageUnavailable."""
        await self._settle(list(self._pending))

    async def _settle(self, turn_ids: Collection[str]) -> None:
        for turn_id in turn_ids:
            if (pending := self._pending.get(turn_id)) is None:
                continue
            reply = await self._retracted(turn_id, pending)
            if reply == b"early":
                continue
            self._pending.pop(turn_id, None)
            if reply == b"decided":
                logger.error("turn %s got its verdict, although its client was told that it failed", turn_id)
            elif reply == b"retracted":
                logger.warning("turn %s is retracted: its client was told that it failed", turn_id)

    async def _retracted(self, turn_id: str, pending: PendingRetraction) -> bytes:
        retraction, deadline_ms = pending
        named: list[str] = [key_names.session(retraction.session_id), key_names.STREAM]
        arguments: list[Argument] = [f"t:{turn_id}", f"t:{retraction.turn_id}", encode(retraction)]
        arguments.append(str(deadline_ms))
        reply: bytes
        if self._confirm is None:  # the script's text is sent, because it may be that no answer comes
            # bounded: one turn
            reply = await stored(self._redis.eval(RETRACT.text, len(named), *named, *arguments))
        else:
            reply = await self._confirm(RETRACT, named, arguments)
        return reply


def _belongs(pending: PendingRetraction, session_id: str) -> bool:
    return pending.retraction.session_id == session_id


def _retraction_of(turn: Turn) -> Turn:
    return Turn(
        turn_id=retraction_id(turn.turn_id),
        session_id=turn.session_id,
        parent_id=turn.turn_id,
        group_id=turn.group_id,
        task_id=turn.task_id,
        policy=turn.policy,
        lineage=turn.lineage,
        user=turn.user,
        relation="retry",
        reason="storage_unavailable",
        context_ids=TokenIds(),
        output_ids=TokenIds(),
        logprobs=Logprobs(),
        versions=(),
        finish="abort",
        train=turn.train,
        started_at=turn.finished_at,
        finished_at=turn.finished_at,
        retry_of=turn.turn_id,
    )
