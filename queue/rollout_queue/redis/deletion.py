"""Deletes sessions and all data of a user, on Redis, for good.

head ──▶ one script: head, texts and continuations give way to a tombstone, and a Deletion in the stream
     ──▶ scrub: the session's entries leave the stream and the dead letters; repeatable, by whichever gateway
"""

import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.codec import SCHEMA, encode
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Deletion, SessionSpec
from rollout_queue.contract.tombstone import DeletionTotals, Tombstone, encode_tombstone, total, user_digest
from rollout_queue.redis import keys
from rollout_queue.redis.appending import continuations_of
from rollout_queue.redis.availability import stored
from rollout_queue.redis.scripts import deletion as deletion_scripts
from rollout_queue.redis.writer import UNREADABLE, read_head

logger = logging.getLogger(__name__)

PAGE = 100
"""Entries that one script looks at: Redis serves nobody else meanwhile."""
OVERDUE_S = 30.0
"""After that, whoever began to scrub is taken for dead."""
MOST_AT_ONCE = 1000


class RedisDeleter:
    """StreamDeleter on Redis. `redis` returns bytes (decode_responses off)."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._delete = redis.register_script(deletion_scripts.DELETE)
        self._scrub_page = redis.register_script(deletion_scripts.SCRUB)

    async def delete_session(self, session_id: str) -> Tombstone | None:
        tombstone = await self._bury(session_id)
        if tombstone is not None:
            await self._try_to_scrub([session_id])
        return tombstone

    async def delete_user(self, user: str) -> DeletionTotals:
        # From here on no session and no call is taken for this name, so what is found is all.
        await stored(self._redis.sadd(keys.DELETED_USERS, user_digest(user)))
        names: Collection[bytes] = await stored(self._redis.smembers(keys.user_sessions(user)))
        buried = [await self._bury(name.decode()) for name in sorted(names)]
        tombstones = [tombstone for tombstone in buried if tombstone is not None]
        await stored(self._redis.delete(keys.user_sessions(user)))
        buried_ids = [tombstone.session_id for tombstone in tombstones]
        for start in range(0, len(buried_ids), MOST_AT_ONCE):
            await self._try_to_scrub(buried_ids[start : start + MOST_AT_ONCE])
        return total(tombstones)

    async def finish(self, now: float) -> int:
        overdue: list[bytes] = await stored(
            self._redis.zrange(
                keys.DELETING, "-inf", now - OVERDUE_S, byscore=True, offset=0, num=MOST_AT_ONCE
            )
        )
        if overdue:
            await self._scrub([name.decode() for name in overdue])
        return len(overdue)

    async def _bury(self, session_id: str) -> Tombstone | None:
        """All but the entries of the streams, at once. None where there is no such session (any more)."""
        key = keys.session(session_id)
        while True:
            fields: dict[bytes, bytes] = await stored(self._redis.hgetall(key))
            if b"spec" not in fields:
                return None
            head = _legible(fields) or await self._bare(session_id)
            tombstone = _tombstone(head, fields)
            named, arguments = _deletion(head, tombstone, len(fields))
            match await stored(self._delete(named, arguments)):
                case b"done":
                    return tombstone
                case b"deleted":
                    return None

    async def _bare(self, session_id: str) -> SessionHead:
        """What can be said of a session without reading it."""
        created_at = await stored(self._redis.zscore(keys.SESSIONS, session_id))
        return SessionHead(spec=SessionSpec(session_id=session_id, created_at=created_at or 0.0))

    async def _try_to_scrub(self, session_ids: Collection[str]) -> None:
        """The sessions are deleted, and that is to be heard: what is left to do is not forgotten."""
        try:
            await self._scrub(session_ids)
        except StorageUnavailable as error:
            logger.warning("the entries of %d deleted sessions stay until later: %s", len(session_ids), error)

    async def _scrub(self, session_ids: Collection[str]) -> None:
        """Remove what the streams hold of deleted sessions: nothing is added to them any more.

        The dead letters come last: what the trainer sets aside meanwhile, it takes from the stream.
        """
        if not session_ids:
            return
        packed = [msgspec.msgpack.encode(session_id) for session_id in session_ids]
        for stream, schema in ((keys.STREAM, bytes([SCHEMA])), (keys.DEAD_LETTERS, b"")):
            first: bytes | None = b"-"
            while first is not None:
                last = await stored(self._scrub_page([stream], [first, PAGE, schema, *packed]))
                first = None if last is None else b"(" + last
        await stored(self._redis.zrem(keys.DELETING, *session_ids))


def _legible(fields: Mapping[bytes, bytes]) -> SessionHead | None:
    """The head, as far as this build can read it: what it cannot goes all the same."""
    for part in (fields, {b"spec": fields[b"spec"]}):
        with suppress(*UNREADABLE):
            return read_head(part)
    return None


def _tombstone(head: SessionHead, fields: Mapping[bytes, bytes]) -> Tombstone:
    return Tombstone(
        session_id=head.spec.session_id,
        owner=head.spec.owner,
        created_at=head.spec.created_at,
        deleted_at=time.time(),
        turns=sum(name.startswith(b"t:") for name in fields),
        rewards=sum(name.startswith(b"r:") for name in fields),
        verdict=head.verdict.code if head.verdict else None,
    )


def _deletion(
    head: SessionHead, tombstone: Tombstone, seen: int
) -> tuple[list[str], list[str | bytes | float]]:
    """Keys and arguments of the script."""
    spec = head.spec
    traces, numbers = traces_of(head)
    named = [keys.session(spec.session_id), keys.STREAM, keys.VERDICTS, keys.DELETED, keys.DELETING]
    named += traces
    record = Deletion(
        session_id=spec.session_id,
        created_at=tombstone.deleted_at,
        group_id=spec.group_id,
        group_size=spec.group_size,
    )
    arguments: list[str | bytes | float] = [spec.session_id, seen, encode_tombstone(tombstone)]
    arguments += [encode(record), tombstone.deleted_at, *numbers]
    return named, arguments


def traces_of(head: SessionHead) -> tuple[list[str], list[int]]:
    """The keys beside its own in which a session may stand, and how many are places, users and responses."""
    owner = head.spec.owner
    places = [keys.DEADLINES, keys.SETTLED, keys.OPEN, keys.open_of(owner), keys.UNTRAINED]
    users = [keys.user_sessions(user) for user in head.users]
    responses = [keys.response(name) for name in sorted({turn.completion_id for turn in head.turns})]
    continuations = [key for turn in head.turns for key in continuations_of(turn, owner)]
    return [*places, *users, *responses, *continuations], [len(places), len(users), len(responses)]
