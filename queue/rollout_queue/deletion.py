"""Deletes sessions and all data of a user, on Redis, for good.

head ──▶ one script: head, texts and continuations give way to a tombstone, and a Deletion in the stream
     ──▶ scrub: the session's entries leave the stream and the dead letters; repeatable, by whichever gateway
"""

import logging
import time
from collections.abc import Collection, Mapping

import msgspec
from redis.asyncio import Redis

from rollout_queue import keys, redis_scripts
from rollout_queue.availability import stored
from rollout_queue.codec import SCHEMA, encode
from rollout_queue.errors import InvalidRecord, StorageUnavailable, UnknownSchema
from rollout_queue.head import SessionHead
from rollout_queue.records import Deletion
from rollout_queue.redis_writer import continuations_of, read_head
from rollout_queue.tombstone import DeletedUser, Tombstone, encode_tombstone, total, user_digest

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
        self._delete = redis.register_script(redis_scripts.DELETE)
        self._scrub_page = redis.register_script(redis_scripts.SCRUB)

    async def delete_session(self, session_id: str) -> Tombstone | None:
        tombstone = await self._bury(session_id)
        if tombstone is not None:
            await self._try_to_scrub([session_id])
        return tombstone

    async def delete_user(self, user: str) -> DeletedUser:
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
            if (head := _legible(fields)) is None:
                return None
            tombstone = _tombstone(head)
            named, arguments = _deletion(head, tombstone, len(fields))
            match await stored(self._delete(named, arguments)):
                case b"done":
                    return tombstone
                case b"deleted":
                    return None

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
    try:
        return read_head(fields)
    except (InvalidRecord, UnknownSchema):
        return read_head({name: value for name, value in fields.items() if name == b"spec"})


def _tombstone(head: SessionHead) -> Tombstone:
    return Tombstone(
        session_id=head.spec.session_id,
        owner=head.spec.owner,
        created_at=head.spec.created_at,
        deleted_at=time.time(),
        turns=len(head.turns),
        rewards=len(head.rewards),
    )


def _deletion(
    head: SessionHead, tombstone: Tombstone, seen: int
) -> tuple[list[str], list[str | bytes | float]]:
    """Keys and arguments of the script."""
    spec = head.spec
    places = [keys.DEADLINES, keys.OPEN, keys.open_of(spec.owner), keys.UNTRAINED]
    users = [keys.user_sessions(user) for user in head.users]
    responses = [keys.response(name) for name in sorted({turn.completion_id for turn in head.turns})]
    continuations = [key for turn in head.turns for key in continuations_of(turn, spec.owner)]
    named = [keys.session(spec.session_id), keys.STREAM, keys.VERDICTS, keys.DELETED, keys.DELETING]
    named += [*places, *users, *responses, *continuations]
    record = Deletion(
        session_id=spec.session_id,
        created_at=tombstone.deleted_at,
        group_id=spec.group_id,
        group_size=spec.group_size,
    )
    arguments: list[str | bytes | float] = [spec.session_id, seen, encode_tombstone(tombstone)]
    arguments += [encode(record), tombstone.deleted_at, len(places), len(users), len(responses)]
    return named, arguments
