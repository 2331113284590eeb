"""The gateways' end of the stream. Each append is one script, so it is atomic."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from rollout_queue.contract.codec import decode, decode_spec, encode
from rollout_queue.contract.errors import Conflict, GroupTaken, SessionClosed, StorageUnavailable, UserDeleted
from rollout_queue.contract.head import (
    ALL_SESSIONS,
    GroupProgress,
    ListedSession,
    ListPosition,
    ListScope,
    SessionHead,
    Tombstone,
    group_progress,
    user_digest,
    with_terms,
)
from rollout_queue.contract.outcomes import related
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Turn, Verdict
from rollout_queue.contract.stream import NO_IMAGES
from rollout_queue.redis import key_names, session_scripts, turn_store
from rollout_queue.redis.availability import stored
from rollout_queue.redis.lua import Argument, Script, T
from rollout_queue.redis.pipelined import PipelinedConnection, RedisClock
from rollout_queue.redis.session_heads import (
    CACHE_BYTES,
    HeadCache,
    SessionHeads,
    fields_without_turns,
    read_head,
    reading,
)
from rollout_queue.redis.session_lists import (
    LastAppended,
    members_of,
    positions_in,
    progress_of,
    tombstones_of,
    wanted_heads,
)
from rollout_queue.redis.session_store import (
    describe,
    expire,
    group_arguments,
    group_forgotten,
    open_arguments,
    opened,
    outcome_arguments,
    refusal,
)
from rollout_queue.redis.settings import NO_REPLICAS, Replication
from rollout_queue.redis.turn_store import Retractions, append_arguments

logger = logging.getLogger(__name__)

UNANSWERED = (RedisConnectionError, RedisTimeoutError)
"""After these errors, Redis may have stored the record, or may still store it."""
NOT_YET = (b"retried", b"late")
"""After these replies the turn is appended again, because its relation to other attempts, or its deadline,
was out of date."""


class StreamWriter:
    """Every method raises StorageUnavailable when it could not store or read. `redis` returns bytes
    (decode_responses off). The commands of agents' calls go over a connection of their own."""

    def __init__(
        self,
        redis: Redis,
        append_within_s: float = 10.0,
        head_cache_bytes: int = CACHE_BYTES,
        replication: Replication = NO_REPLICAS,
        timeout_s: float = 10.0,
    ) -> None:
        """`append_within_s` is how long Redis may take until it stores a turn; later it refuses the turn.
        `timeout_s` is how long an answer of Redis may take."""
        self._redis = redis
        self._heads = HeadCache(head_cache_bytes)
        self._last = LastAppended(redis, self._heads.clear)
        self._connection = PipelinedConnection(redis, self._last.connected, replication, timeout_s)
        self._replicated = replication.replicas > 0
        self._session_heads = SessionHeads(self._connection, self._heads)
        self._append_within_s = append_within_s
        self._clock = RedisClock(self._connection)
        self._retractions = Retractions(redis, self.confirmed if self._replicated else None)
        self._deleted = 0
        """How many sessions had been deleted at the last `forget_deleted`."""

    async def open_session(self, spec: SessionSpec) -> tuple[SessionSpec, bool]:
        """Create the session, or find the one with that id. Returns it, and whether it was created.

        Raises Conflict when its group has another size or owner, or is full; SessionDeleted; UserDeleted.
        """
        reply = await self._connection.run(session_scripts.OPEN, *open_arguments(spec))
        with reading(spec.session_id):
            return opened(spec, reply)

    async def describe_session(
        self, spec: SessionSpec, now: float, *, counts: bool = False
    ) -> SessionSpec | None:
        """Give the implicit session with this id the spec `spec`, unless it was described or has ended.

        Its time to live begins again at `now`, but it does not expire earlier than before. The trainer learns
        of its group at once (`LateJoin`). With `counts`, it counts as a session for training from now on
        (`key_names.UNTRAINED`); with `spec.train` false, it no longer does. Returns the spec that is stored
        now; None if there is no such session. Raises Conflict as `open_session`; UserDeleted.
        """
        return await describe(self._redis, self.confirmed, spec, now, counts=counts)

    async def open_group(self, specs: Sequence[SessionSpec]) -> None:
        """Create a group with all of its sessions, or nothing.

        Raises Conflict when the group exists; UserDeleted.
        """
        match await self.confirmed(session_scripts.OPEN_GROUP, *group_arguments(specs)):
            case b"exists":
                raise Conflict(f"group {specs[0].shown_group} exists already")
            case b"owner":
                raise GroupTaken(specs[0].shown_group)
            case b"group forgotten":
                raise group_forgotten(specs[0])
            case b"user deleted":
                raise UserDeleted

    async def close(self) -> None:
        """Retract what may be stored, for as long as it may still be, and close the writer's own connection.
        The owner closes `redis`."""
        await self._retractions.close(self._append_within_s + 1.0)
        await self._connection.close()

    @property
    def head_lookups(self) -> tuple[int, int]:
        """How often a head was read from memory alone, and how often Redis had to be read."""
        return self._session_heads.hits, self._session_heads.misses

    async def ping(self) -> None:
        """Wait for a sign that the queue works."""
        await self._connection.command("PING")

    async def load(self, session_id: str, *, turns: bool = True) -> SessionHead | None:
        """The session. With `turns` false it is read without turns, and `turns` is empty."""
        key = key_names.session(session_id)
        if turns:
            fields = await stored(self._redis.hgetall(key))  # bounded: one session
        else:
            fields = await fields_without_turns(self._redis, key)
        with reading(session_id):
            return read_head(fields)

    async def spec_of(self, session_id: str) -> bytes | None:
        """The stored bytes of the session's spec, which this build may be unable to decode."""
        spec: bytes | None = await stored(self._redis.hget(key_names.session(session_id), "spec"))
        return spec

    async def load_for_call(self, session_id: str) -> SessionHead | None:
        """The same as `load`, but from memory if this process has seen every record of the session. The
        verdicts may then be out of date."""
        known = await self._session_heads.load(session_id)
        return None if known is None else known.head

    async def sessions(
        self,
        after: ListPosition,
        count: int,
        wanted: Callable[[SessionSpec], bool] = lambda _: True,
        scope: ListScope = ALL_SESSIONS,
    ) -> Sequence[ListedSession]:
        """Up to `count` sessions after a position, in the order of `scope`. Deleted sessions keep their
        position.

        A session whose spec `wanted` refuses is not read, and is None in the list. The scope may leave out
        sessions of other groups and users, and need not.
        """
        positions = await positions_in(self._redis, after, count, scope)
        names = [each.session_id for each in positions]
        heads, gone = await wanted_heads(self._redis, names, wanted, turns=scope.turns)
        tombstones = await tombstones_of(self._redis, gone)
        found: dict[str, SessionHead | Tombstone] = {**tombstones, **heads}
        return [ListedSession(position, found.get(position.session_id)) for position in positions]

    async def tombstone(self, session_id: str) -> Tombstone | None:
        """The tombstone of the session; None if it was not deleted."""
        return (await tombstones_of(self._redis, [session_id])).get(session_id)

    async def user_deleted(self, user: str) -> bool:
        digest = user_digest(user)
        return bool(await self._connection.command("SISMEMBER", key_names.DELETED_USERS, digest))

    async def forget_deleted(self) -> None:
        """Drop from memory the sessions that any gateway has deleted since the last call."""
        deleted: int = await stored(self._redis.hlen(key_names.DELETED))
        if deleted == self._deleted:
            return
        for session_id in await tombstones_of(self._redis, self._heads.session_ids()):
            self._heads.drop(session_id)
        self._deleted = deleted

    async def append_turn(
        self,
        turn: Turn,
        expires_at: float,
        owner: str = "",
        opening: SessionSpec | None = None,
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> Turn:
        """Store the turn in stream and head, once. If its session does not exist, `opening` creates it.

        `images` has the bytes of the turn's images, by hash. They are stored with it, once for all sessions,
        and kept until the last session that shows them is deleted or forgotten.

        Later calls of `owner` find the session (`find_continuations`) by the turn's reply digest; if the turn
        called tools, also by its id; if it has no parent, also by its request digest.
        Returns the turn as stored, with its relation to other attempts at the same call (`outcomes.related`).
        Raises SessionClosed when the session has ended; SessionDeleted, UserDeleted. When this raises
        StorageUnavailable, the turn is not trained, even if Redis has stored it (`retract_failed`).
        """
        recorded, seen, late = turn, None, 0
        if turn.last_attempt and turn.request_digest:
            recorded, seen = await self._related(turn)
        while (reply := await self._append(recorded, expires_at, owner, seen, opening, images)) in NOT_YET:
            if reply == b"late":
                late += 1
                if late == 2:
                    raise StorageUnavailable("Redis is too slow: it refused the turn as too late")
                await self._clock.read()
            else:
                recorded, seen = await self._related(turn)
        if isinstance(reply, bytes):
            raise refusal(turn.session_id, reply)
        before, after = reply
        self._heads.grow(before, after, recorded)
        self._last.note(turn.session_id, f"t:{recorded.turn_id}")
        return recorded

    async def _related(self, turn: Turn) -> tuple[Turn, int | None]:
        """The turn with its relation to the stored ones, and how many fields the session's hash had then."""
        if (known := await self._session_heads.load(turn.session_id)) is None:
            return turn, 0
        return known.head.by_id.get(turn.turn_id) or related(turn, known.head.turns), known.fields

    async def images(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        """The stored images among these, by hash."""
        images: dict[str, bytes] = {}
        for sha256 in sorted(hashes):  # one by one: an image may have megabytes
            if (png := await stored(self._redis.get(key_names.image(sha256)))) is not None:
                images[sha256] = png
        return images

    async def _append(
        self,
        turn: Turn,
        expires_at: float,
        owner: str,
        seen: int | None,
        opening: SessionSpec | None,
        images: Mapping[str, bytes],
    ) -> bytes | list[int]:
        """How many fields the session's hash had before and has now, or why the turn is not stored."""
        deadline_ms = await self._clock.deadline_ms(self._append_within_s)
        named, arguments = append_arguments(turn, expires_at, owner, seen, opening, deadline_ms, images)
        try:
            return await self._connection.run(turn_store.APPEND_TURN, named, arguments)
        except StorageUnavailable as error:
            if turn.finish != "abort" and isinstance(error.__cause__, UNANSWERED):
                self._retractions.add(turn, deadline_ms)
                await self._retractions.settle_at_once(turn.turn_id)
            raise

    async def confirmed(self, script: Script[T], named: list[str], arguments: list[Argument]) -> T:
        """What the script answers, once the replicas have what it wrote. Raises StorageUnavailable."""
        if not self._replicated:
            return await script.run(self._redis, named, arguments)
        return await self._connection.run(script, named, arguments)

    async def retract_failed(self) -> None:
        """Retract the turns that Redis may have stored although it did not answer their append; and if it was
        away, note which of the last records it has lost."""
        await self._retractions.settle_all()
        await self._last.check()

    async def find_continuations(self, owner: str, digests: Sequence[str]) -> Sequence[str | None]:
        """The session of `owner` for each reply digest, request digest or turn id; None if there is
        none."""
        if not digests:
            return []
        names = [key_names.continuation(owner, digest) for digest in digests]
        # bounded: by the messages of one call
        found: list[bytes | None] = await self._connection.command("MGET", *names)
        return [None if name is None else name.decode() for name in found]

    async def append_reward(self, reward: Reward) -> Reward:
        """Store the reward. Returns the reward that is stored under its key. The returned reward is `late` if
        the session had a verdict already.

        Raises SessionUnknown, SessionDeleted.
        """
        late = msgspec.structs.replace(reward, late=True)
        reply = await self.confirmed(
            turn_store.APPEND_REWARD,
            [key_names.session(reward.session_id), key_names.STREAM, key_names.DELETED],
            [reward.session_id, f"r:{reward.key}", encode(reward), encode(late), repr(reward.value)],
        )
        if isinstance(reply, list):
            raise refusal(reward.session_id, reply[0])
        self._last.note(reward.session_id, f"r:{reward.key}")
        with reading(reward.session_id):
            return cast(Reward, decode(reply))

    async def append_outcome(
        self, outcome: Outcome, reward: Reward | None, verdict: Verdict | None
    ) -> Outcome:
        """Close the session. Store a last `reward` too, unless its key exists, and the `verdict` if one is
        given. The outcome gets the group and the task that the session has by then (`describe_session`).

        Returns the stored outcome, which may be an earlier one. Raises SessionUnknown, SessionDeleted.
        """
        await self._retractions.settle(outcome.session_id)
        while True:
            named, arguments = outcome_arguments(outcome, reward, verdict)
            reply = await self.confirmed(turn_store.APPEND_OUTCOME, named, arguments)
            if not isinstance(reply, list):
                break
            if reply[0] != b"described":
                raise refusal(outcome.session_id, reply[0])
            with reading(outcome.session_id):
                outcome = with_terms(outcome, decode_spec(reply[1]))
        self._last.note(outcome.session_id, "outcome")
        with reading(outcome.session_id):
            return cast(Outcome, decode(reply))

    async def expire(self, now: float, limit: int) -> int:
        """Close sessions whose deadline has passed and that have no outcome or no reward. Returns how
        many."""
        return await expire(self._redis, now, limit)

    async def group_progress(self, group_id: str) -> GroupProgress:
        """How far the sessions of the group have come, and the size of the group."""
        size = await stored(self._redis.hget(key_names.group(group_id), "size"))
        found = await progress_of(self._redis, await members_of(self._redis, group_id))
        return group_progress(int(size or 0) or None, (each.stage for each in found))

    async def heartbeat(self, session_id: str, now: float, at_least_s: float = 0.0) -> float:
        """Note that the agent of an open session is alive: the session expires as if a call had ended at
        `now`, and stays open for at least `at_least_s`, even if its time to live is shorter.

        Returns when it expires, seconds since the epoch. Raises SessionClosed when the session has ended or
        has expired.
        """
        key = key_names.session(session_id)
        if (raw := await stored(self._redis.hget(key, "spec"))) is None:
            raise SessionClosed(f"session {session_id} is unknown")
        with reading(session_id):
            expires_at = now + max(decode_spec(raw).ttl_s, at_least_s)
        arguments = (session_id, now, expires_at)
        if not await session_scripts.HEARTBEAT.run(self._redis, [key, key_names.DEADLINES], arguments):
            raise SessionClosed(f"session {session_id} is finished")
        self._heads.drop(session_id)
        return expires_at
