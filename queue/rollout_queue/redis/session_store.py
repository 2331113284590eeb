"""Opens, describes, ends and expires sessions, and repairs the lists of them.

A call may open a session that is described later: one script, so that of several descriptions one is stored.

call ──▶ implicit session ──describe──▶ spec with its group, and a LateJoin in the stream
                └── turns, which name no group ──▶ stream

Expiry closes sessions whose deadline has passed. It puts off sessions that this build cannot read, and logs
them. Lists that Redis has lost are made whole again from each other and from the heads:

weir:sessions  ◀── the sessions of weir:settled and weir:deadlines
weir:deadlines ◀── the sessions of weir:sessions that may expire: not those with a verdict, or with an
                   outcome and a reward, which expiry has taken from the list

`session_retention.py` adds missing sessions to `weir:settled`. A list that is lost is there again with the
next session, so its length does not tell.
"""

import logging
from collections.abc import AsyncIterator, Sequence

import msgspec
from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.codec import decode_spec, encode
from rollout_queue.contract.errors import (
    Conflict,
    Deleted,
    GroupTaken,
    InvalidRecord,
    RewardsTooLarge,
    SessionClosed,
    SessionDeleted,
    SessionForgotten,
    SessionUnknown,
    TooManyRewards,
    UnknownSchema,
    UserDeleted,
)
from rollout_queue.contract.head import TERMS, late_join_of, user_digest
from rollout_queue.contract.outcomes import expiry
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Verdict
from rollout_queue.redis import key_names, session_scripts
from rollout_queue.redis.availability import stored
from rollout_queue.redis.losses import note_loss_async
from rollout_queue.redis.lua import Argument, Confirm, Script
from rollout_queue.redis.session_heads import UNREADABLE, reading

logger = logging.getLogger(__name__)


def terms_of(source: Outcome | SessionSpec) -> bytes:
    """The terms as bytes: those of an outcome equal those of its session."""
    return msgspec.json.encode([getattr(source, name) for name in TERMS])


def outcome_arguments(
    outcome: Outcome, reward: Reward | None, verdict: Verdict | None
) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of APPEND_OUTCOME."""
    named: list[str] = [key_names.session(outcome.session_id), key_names.STREAM, key_names.DEADLINES]
    named += [key_names.VERDICTS, key_names.DELETED, key_names.SETTLED]
    return named, [
        outcome.session_id,
        encode(outcome),
        f"r:{reward.key}" if reward else "",
        encode(reward) if reward else b"",
        msgspec.json.encode(verdict) if verdict else b"",
        verdict.code if verdict else "",
        repr(reward.value) if reward else "",
        terms_of(outcome),
    ]


def open_arguments(spec: SessionSpec) -> tuple[list[str], list[Argument]]:
    session_keys: list[str] = [key_names.session(spec.session_id), key_names.SESSIONS, key_names.DEADLINES]
    session_keys += [key_names.DELETED, key_names.DELETED_USERS, key_names.user_sessions(spec.user or "")]
    session_keys.append(key_names.FORGOTTEN_IDS)
    if spec.group_id is not None:
        session_keys += [key_names.group(spec.group_id), key_names.group_members(spec.group_id)]
    return session_keys, [
        spec.session_id,
        encode(spec),
        spec.created_at,
        spec.created_at + spec.ttl_s,
        spec.owner,
        "" if spec.group_size is None else str(spec.group_size),
        user_digest(spec.user) if spec.user else "",
        spec.group_id or "",
    ]


def opened(spec: SessionSpec, reply: list[bytes]) -> tuple[SessionSpec, bool]:
    """The stored session, and whether OPEN created it. Raises the error that the reply names."""
    match reply[0]:
        case b"created":
            return spec, True
        case b"exists":
            return decode_spec(reply[1]), False
        case _:
            raise opening_refusal(spec, reply)


def opening_refusal(spec: SessionSpec, reply: list[bytes]) -> Conflict | Deleted:
    """The error for the reply of a script that did not store the spec."""
    match reply[0]:
        case b"deleted":
            return SessionDeleted(spec.session_id)
        case b"user deleted":
            return UserDeleted()
        case b"forgotten":
            return SessionForgotten(spec.session_id)
        case b"group forgotten":
            return group_forgotten(spec)
        case b"size":
            return Conflict(f"group {spec.shown_group} has size {reply[1].decode()}")
        case b"full":
            return Conflict(f"group {spec.shown_group} has its {reply[1].decode()} sessions already")
        case _:
            return GroupTaken(spec.shown_group)


def group_arguments(specs: Sequence[SessionSpec]) -> tuple[list[str], list[Argument]]:
    first = specs[0]
    assert first.group_id is not None  # noqa: S101 - `open_group` is called for groups only
    named: list[str] = [
        key_names.group(first.group_id),
        key_names.group_members(first.group_id),
        key_names.SESSIONS,
        key_names.DEADLINES,
        key_names.DELETED_USERS,
        key_names.user_sessions(first.user or ""),
        key_names.FORGOTTEN_IDS,
    ]
    named += [key_names.session(spec.session_id) for spec in specs]
    arguments: list[Argument] = [len(specs), first.owner]
    arguments += [first.created_at, first.created_at + first.ttl_s]
    arguments += [user_digest(first.user) if first.user else "", first.group_id]
    for spec in specs:
        arguments += [spec.session_id, encode(spec)]
    return named, arguments


def group_forgotten(spec: SessionSpec) -> Conflict:
    return Conflict(f"group {spec.shown_group} ended and was forgotten; its id cannot be used again yet")


def refusal(session_id: str, reason: bytes) -> SessionClosed | Deleted | RewardsTooLarge | TooManyRewards:
    """The error for the `reason` with which a script refused to append."""
    match reason:
        case b"deleted":
            return SessionDeleted(session_id)
        case b"user deleted":
            return UserDeleted()
        case b"unknown":
            return SessionUnknown(session_id)
        case b"too large":
            return RewardsTooLarge(session_id)
        case b"too many":
            return TooManyRewards(session_id)
        case _:
            return SessionClosed(f"session {session_id} is {reason.decode()}")


async def describe(
    redis: Redis, confirm: Confirm, spec: SessionSpec, now: float, *, counts: bool
) -> SessionSpec | None:
    """See `StreamWriter.describe_session`. Several gateways may do so at the same time."""
    while (seen := await stored(redis.hget(key_names.session(spec.session_id), "spec"))) is not None:
        with reading(spec.session_id):
            known = decode_spec(seen)
        if not known.implicit:
            return known
        reply = await confirm(session_scripts.DESCRIBE, *_arguments(spec, seen, now, counts))
        match reply[0]:
            case b"described":
                return spec
            case b"ended":
                return known
            case b"changed":
                continue
            case _:
                raise opening_refusal(spec, reply)
    return None


def _arguments(spec: SessionSpec, seen: bytes, now: float, counts: bool) -> tuple[list[str], list[Argument]]:
    named: list[str] = [key_names.session(spec.session_id), key_names.STREAM, key_names.DEADLINES]
    named += [key_names.DELETED_USERS, key_names.user_sessions(spec.user or "")]
    named += [key_names.FORGOTTEN_IDS, key_names.UNTRAINED]
    if spec.group_id is not None:
        named += [key_names.group(spec.group_id), key_names.group_members(spec.group_id)]
    join = late_join_of(spec, now)
    return named, [
        spec.session_id,
        seen,
        encode(spec),
        repr(now),
        repr(spec.ttl_s),
        spec.owner,
        "" if spec.group_size is None else str(spec.group_size),
        user_digest(spec.user) if spec.user else "",
        spec.group_id or "",
        terms_of(spec),
        encode(join) if join else b"",
        "-1" if not spec.train else str(int(counts)),
    ]


PUT_OFF_S = 60.0
"""A session that cannot be read is tried again after this time, because a newer build may run by then."""


async def expire(redis: Redis, now: float, limit: int) -> int:
    """Close or put off up to `limit` overdue sessions. Returns how many. Several gateways may do so at the
    same time. Raises StorageUnavailable."""
    overdue: list[bytes] = await stored(redis.zrangebyscore(key_names.DEADLINES, 0, now, start=0, num=limit))
    closed, unreadable, last_error = 0, list[str](), ""
    for session_id in (name.decode() for name in overdue):
        try:
            closed += await _expire_one(redis, session_id, now)
        except UNREADABLE as error:
            unreadable.append(session_id)
            last_error = str(error)
            await session_scripts.PUT_OFF.run(redis, [key_names.DEADLINES], [session_id, now + PUT_OFF_S])
    if unreadable:
        logger.error(
            "%d sessions cannot be read and do not expire, among them %s: %s",
            len(unreadable),
            unreadable[-1],
            last_error,
        )
    return closed + len(unreadable)


async def _expire_one(redis: Redis, session_id: str, now: float) -> int:
    raw = await stored(redis.hget(key_names.session(session_id), "spec"))
    if raw is None:
        await stored(redis.zrem(key_names.DEADLINES, session_id))
        return 0
    outcome, verdict = expiry(decode_spec(raw), now)
    named = [key_names.session(session_id), key_names.STREAM, key_names.DEADLINES]
    named += [key_names.VERDICTS, key_names.SETTLED]
    arguments = (session_id, encode(outcome), msgspec.json.encode(verdict), now, terms_of(outcome))
    return await session_scripts.EXPIRE.run(redis, named, arguments)


PAGE = 500
SCAN_EVERY_S = 600.0
"""How often all sessions are looked at for those without a deadline."""
LOOK = Script[list[int]]("""
-- KEYS: sessions, deadlines, settled
-- Returns whether the first session of another list is not in that of all sessions, and how many sessions
-- have neither a deadline nor a time of their verdict.
local function lacks(list)
    local first = redis.call('ZRANGE', list, 0, 0)[1]
    return first and not redis.call('ZSCORE', KEYS[1], first)
end
local function count(list) return redis.call('ZCARD', list) end
return {(lacks(KEYS[2]) or lacks(KEYS[3])) and 1 or 0, count(KEYS[1]) - count(KEYS[2]) - count(KEYS[3])}
""")


class SessionIndexes:
    """Looks at every poll whether a list was lost. `redis` returns bytes (decode_responses off)."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._known = 0
        """How many sessions rightly had no deadline at the last scan: only the trainer has to act."""
        self._scanned_at = float("-inf")

    async def mend(self) -> None:
        """Raises StorageUnavailable."""
        named = [key_names.SESSIONS, key_names.DEADLINES, key_names.SETTLED]
        lacking, loose = await LOOK.run(self._redis, named)
        if lacking:
            listed = [name async for name in self._list_again()]
            again = f"the gateways have listed {len(listed)} of them again"
            said = f"{key_names.SESSIONS} had lost sessions: {again}"
            await note_loss_async(self._redis, key_names.SESSIONS, said)
        elif loose > self._known and clock.monotonic() - self._scanned_at > SCAN_EVERY_S:
            self._scanned_at = clock.monotonic()
            timed = [name async for name in self._time_again()]
            self._known = loose - len(timed)
            if timed:
                said = f"{key_names.DEADLINES} had lost sessions: {len(timed)} of them expire again"
                await note_loss_async(self._redis, key_names.DEADLINES, said)
        elif loose < self._known:
            self._known = loose

    async def _list_again(self) -> AsyncIterator[str]:
        """List the sessions of the other lists. Yields those that were not listed."""
        for source in (key_names.SETTLED, key_names.DEADLINES):
            async for specs in self._specs(source):
                scores = {name: spec.created_at for name, spec in specs.items()}
                for name in await self._added(session_scripts.LIST_AGAIN, key_names.SESSIONS, scores):
                    yield name

    async def _time_again(self) -> AsyncIterator[str]:
        """Give a whole time to live to sessions that have none and may expire. Yields them."""
        async for specs in self._specs(key_names.SESSIONS):
            now = clock.now()
            scores = {name: now + spec.ttl_s for name, spec in specs.items()}
            for name in await self._added(session_scripts.TIME_AGAIN, key_names.DEADLINES, scores):
                yield name

    async def _added(self, script: Script[int], key: key_names.Key, scores: dict[str, float]) -> list[str]:
        """Add sessions to a list with a script, which looks at each again: it may have ended, or be deleted,
        since its head was read. Returns those that were missing."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name, score in scores.items():
                script.queue(pipeline, [key_names.session(name), key], [name, score])
            added = await stored(pipeline.execute())
        return [name for name, was_missing in zip(scores, added, strict=True) if was_missing]

    async def _specs(self, source: key_names.Key) -> AsyncIterator[dict[str, SessionSpec]]:
        """What was said of the sessions of a list, page by page, without those that cannot be read."""
        async for names in self._pages(source):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.hget(key_names.session(name), "spec")
                found = await stored(pipeline.execute())
            specs: dict[str, SessionSpec] = {}
            for name, spec in zip(names, found, strict=True):
                try:
                    if spec is not None:
                        specs[name] = decode_spec(spec)
                except (InvalidRecord, UnknownSchema) as error:
                    logger.warning("session %s cannot be read, and stays unlisted: %s", name, error)
            yield specs

    async def _pages(self, source: key_names.Key) -> AsyncIterator[list[str]]:
        start = 0
        while page := await stored(self._redis.zrange(source, start, start + PAGE - 1)):
            yield [name.decode() for name in page]
            start += len(page)
