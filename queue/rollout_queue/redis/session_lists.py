"""Reads lists of sessions: all of them page by page, those that made a version, and how far each has come.

positions after a position ──▶ specs ──the caller wants──▶ whole heads, or summaries without turns and tokens
   of all sessions, or of one group, one user, or the step that made a version

After Redis was away, LastAppended asks whether it still has what it stored last: a power cut takes the end of
its file.

append ─▶ remembered, the last ones ─▶ Redis was away ─▶ are they there? ─▶ weir:losses names the others

A version was made by the steps since the version before, and the sessions that each step trained:

weir:steps   ── a chain of steps, back to a registered version ──▶ TrainedStep, …
weir:trained ── the sessions of one step ──▶ their heads without tokens
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.codec import decode, decode_spec
from rollout_queue.contract.head import (
    ListPosition,
    ListScope,
    SessionHead,
    SessionProgress,
    Tombstone,
    after_position,
    decode_tombstone,
    stage,
)
from rollout_queue.contract.published_policy import TrainedStep, chain
from rollout_queue.contract.records import Outcome, SessionSpec
from rollout_queue.redis import key_names, session_scripts
from rollout_queue.redis.availability import available, stored
from rollout_queue.redis.losses import note_loss_async
from rollout_queue.redis.session_heads import UNREADABLE, batches, pages_of, read_summary, readable_head

logger = logging.getLogger(__name__)

FIELDS_AT_ONCE = 100
"""See `batches`."""
SUMMARY_FIELDS_AT_ONCE = 2000
"""Redis serves nobody else while a script runs, so no script looks at sessions with more fields than this."""
NAMES_AT_ONCE = 500
MOST_MEMBERS = 5000
"""If a group, a user or a step has more sessions, their list looks at all sessions."""


async def positions_after(
    redis: Redis, position: ListPosition, count: int, *, newest_first: bool = False
) -> list[ListPosition]:
    """The next positions after `position`, up to `count`, in the order of the list. Raises
    StorageUnavailable."""
    arguments = (*position, count, int(newest_first))
    found = await session_scripts.LIST.run(redis, [key_names.SESSIONS], arguments)
    return [ListPosition(float(at), name.decode()) for name, at in zip(found[::2], found[1::2], strict=True)]


async def positions_in(
    redis: Redis, position: ListPosition, count: int, scope: ListScope
) -> list[ListPosition]:
    """As `positions_after`; if the scope names a group, a user or a version, only of their sessions."""
    for key in _indexes(scope):
        if await stored(redis.scard(key)) <= MOST_MEMBERS:
            members = await stored(redis.smembers(key))  # bounded: MOST_MEMBERS
            return await _positions_of(redis, list(members), position, count, scope)
    if (version := scope.trained_version) is not None:
        trained: Any = await stored(
            redis.zrange(key_names.TRAINED, version, version, byscore=True, offset=0, num=MOST_MEMBERS + 1)
        )
        if 0 < len(trained) <= MOST_MEMBERS:  # there is none of a step of an older release
            return await _positions_of(redis, trained, position, count, scope)
    return await positions_after(redis, position, count, newest_first=scope.newest_first)


async def _positions_of(
    redis: Redis, names: Sequence[Any], position: ListPosition, count: int, scope: ListScope
) -> list[ListPosition]:
    """The next positions after `position` among the sessions with these ids, in bytes."""
    # bounded: MOST_MEMBERS
    ages = await stored(redis.zmscore(key_names.SESSIONS, list(names))) if names else []
    members = [
        ListPosition(float(at), name.decode()) for name, at in zip(names, ages, strict=True) if at is not None
    ]
    return after_position(members, position, newest_first=scope.newest_first)[:count]


def _indexes(scope: ListScope) -> list[str]:
    indexes: list[str] = [] if scope.group_id is None else [key_names.group_members(scope.group_id)]
    return indexes if scope.user is None else [*indexes, key_names.user_sessions(scope.user)]


async def wanted_heads(
    redis: Redis, names: Sequence[str], wanted: Callable[[SessionSpec], bool], *, turns: bool = True
) -> tuple[Mapping[str, SessionHead], list[str]]:
    """The readable sessions whose spec `wanted` accepts, by id; and the ids that have no session. Without
    `turns`, what is known of their turns is in `unread`.

    Raises StorageUnavailable.
    """
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hget(key_names.session(name), "spec")
        specs = dict(zip(names, await stored(pipeline.execute()), strict=True))
    chosen = [name for name, spec in specs.items() if spec is not None and _chosen(name, spec, wanted)]
    heads = {} if turns else await _summaries(redis, chosen)
    heads |= await _whole(redis, [name for name in chosen if name not in heads])
    gone = [name for name, spec in specs.items() if spec is None]
    return heads, gone + [name for name in chosen if name not in heads]


async def _summaries(redis: Redis, names: Sequence[str]) -> dict[str, SessionHead]:
    """The heads without turns. A session is missing if its sums are not those of its turns, or if it cannot
    be read."""
    heads: dict[str, SessionHead] = {}
    for page in batches(await field_counts(redis, names), SUMMARY_FIELDS_AT_ONCE):
        found = await session_scripts.SUMMARIES.run(redis, [key_names.session(name) for name in page])
        for name, (turns, *fields) in zip(page, found, strict=True):
            try:
                head = read_summary(dict(zip(fields[::2], fields[1::2], strict=True)), turns)
            except UNREADABLE:  # the whole head tells why, or can be read
                continue
            if head is not None:
                heads[name] = head
    return heads


async def _whole(redis: Redis, names: Sequence[str]) -> dict[str, SessionHead]:
    heads: dict[str, SessionHead] = {}
    for batch in batches(await field_counts(redis, names), FIELDS_AT_ONCE):
        async with redis.pipeline(transaction=False) as pipeline:
            for name in batch:
                pipeline.hgetall(key_names.session(name))
            for name, fields in zip(batch, await stored(pipeline.execute()), strict=True):
                if (head := readable_head(name, fields)) is not None:
                    heads[name] = head
    return heads


async def field_counts(redis: Redis, names: Sequence[str]) -> list[tuple[str, int]]:
    """How many fields each session has."""
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hlen(key_names.session(name))
        return list(zip(names, await stored(pipeline.execute()), strict=True))


async def tombstones_of(redis: Redis, session_ids: Collection[str]) -> Mapping[str, Tombstone]:
    """The tombstones of those that were deleted, by id. Raises StorageUnavailable."""
    tombstones: dict[str, Tombstone] = {}
    for page in pages_of(session_ids, NAMES_AT_ONCE):
        found: list[bytes | None] = await stored(redis.hmget(key_names.DELETED, page))  # bounded: by the page
        raw = zip(page, found, strict=True)
        tombstones |= {name: decode_tombstone(value) for name, value in raw if value is not None}
    return tombstones


async def members_of(redis: Redis, group_id: str) -> list[str]:
    """The ids of a group's sessions, sorted. Raises StorageUnavailable."""
    with available():
        return sorted(
            {
                name.decode()
                async for name in redis.sscan_iter(key_names.group_members(group_id), count=NAMES_AT_ONCE)
            }
        )


def _chosen(name: str, spec: bytes, wanted: Callable[[SessionSpec], bool]) -> bool:
    try:
        return wanted(decode_spec(spec))
    except UNREADABLE as error:
        logger.error("session %s cannot be read and is left out of a list: %s", name, error)
        return False


REMEMBERED = 1000
"""How many records: those of the last seconds. More than Redis loses by `appendfsync everysec`."""
NAMED = 3
"""How many sessions the sentence names."""

Record = tuple[str, str]
"""A session, and the field of its hash that holds the record."""


class LastAppended:
    """The last records that one process has appended, and that Redis has confirmed."""

    def __init__(self, redis: Redis, on_connect: Callable[[], None]) -> None:
        """`on_connect` is called at each new connection, for Redis may hold less than cached heads say."""
        self._redis, self._on_connect = redis, on_connect
        self._last: deque[Record] = deque(maxlen=REMEMBERED)
        self._connections = 0
        self._checked = 1

    def connected(self) -> None:
        """Note a new connection: Redis may have been started anew since the one before."""
        self._connections += 1
        self._on_connect()

    def note(self, session_id: str, field: str) -> None:
        self._last.append((session_id, field))

    async def check(self) -> None:
        """After a new connection, look once for the records. Raises StorageUnavailable."""
        connections = self._connections
        if connections <= self._checked:
            return
        gone = await self._gone(list(self._last))
        self._checked = connections
        if gone:
            self._last = deque((each for each in self._last if each not in gone), maxlen=REMEMBERED)
            sessions = sorted({session_id for session_id, _ in gone})
            more = "" if len(sessions) <= NAMED else f" and {len(sessions) - NAMED} more"
            said = (
                f"Redis came back without its last writes: {key_names.STREAM} and the heads lack {len(gone)} "
                "records that clients were told are stored, of session "
                f"{', '.join(sessions[:NAMED])}{more}; `weir audit --answers` names them (appendfsync always "
                "would have kept them)"
            )
            await note_loss_async(self._redis, key_names.session(""), said)

    async def _gone(self, records: Sequence[Record]) -> set[Record]:
        """Those that are not there; not those of sessions that were deleted or forgotten."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for session_id, field in records:
                pipeline.hexists(key_names.session(session_id), field)
                pipeline.zscore(key_names.FORGOTTEN_IDS, f"s:{session_id}")
            found = await stored(pipeline.execute())
        pairs = zip(records, found[::2], found[1::2], strict=True)
        gone = {record for record, there, forgotten in pairs if not there and forgotten is None}
        deleted = await tombstones_of(self._redis, {session_id for session_id, _ in gone})
        return {record for record in gone if record[0] not in deleted}


STEPS_AT_ONCE = 64
MOST_STEPS = 1024
"""How many steps one version can be traced back."""
STEP_NAMES_AT_ONCE = 1000
SESSIONS_AT_ONCE = 100
NOT_READ = (b"t:", b"q:", b"e:")
"""Fields with tokens, which are most of a session, and marks of retried requests."""


async def steps_of(redis: Redis, version: int) -> list[TrainedStep]:
    """The steps that made `version` out of the registered version before it, oldest first; as far as Redis
    has them. Raises StorageUnavailable."""
    steps: list[TrainedStep] = []
    while len(steps) < MOST_STEPS and (chained := await _chain(redis, version)):
        registered = await _registered(redis, [step.base for step in chained])
        for step in chained:
            steps.append(step)
            if step.base in registered:
                return steps[::-1]
        version = chained[-1].base
    return steps[::-1]


async def is_known(redis: Redis, version: int) -> bool:
    """Whether the version was registered, or made by a step that Redis has. Raises StorageUnavailable."""
    made = await stored(redis.zcount(key_names.STEPS, version, version))
    return bool(made) or bool(await _registered(redis, [version]))


async def trained_sessions(redis: Redis, version: int) -> list[str]:
    """The ids of the sessions that the step which made `version` has trained, sorted. Deleted and forgotten
    ones are not among them. Raises StorageUnavailable."""
    names: list[str] = []
    while True:
        page: Any = await stored(
            redis.zrange(
                key_names.TRAINED, version, version, byscore=True, offset=len(names), num=STEP_NAMES_AT_ONCE
            )
        )
        names += [name.decode() for name in page]
        if len(page) < STEP_NAMES_AT_ONCE:
            return sorted(set(names))


async def heads_without_tokens(redis: Redis, session_ids: Sequence[str]) -> Mapping[str, SessionHead]:
    """The readable sessions among these, by id; `turns` is empty, and the verdicts of turns are there. Raises
    StorageUnavailable."""
    heads: dict[str, SessionHead] = {}
    for start in range(0, len(session_ids), SESSIONS_AT_ONCE):
        page = session_ids[start : start + SESSIONS_AT_ONCE]
        async with redis.pipeline(transaction=False) as pipeline:
            for name in page:
                pipeline.hkeys(key_names.session(name))
            listed = dict(zip(page, await stored(pipeline.execute()), strict=True))
        wanted = {
            name: [each for each in fields if each[:2] not in NOT_READ] for name, fields in listed.items()
        }
        wanted = {name: fields for name, fields in wanted.items() if fields}
        async with redis.pipeline(transaction=False) as pipeline:
            for name, fields in wanted.items():
                pipeline.hmget(key_names.session(name), fields)
            replies = await stored(pipeline.execute())
        for (name, fields), values in zip(wanted.items(), replies, strict=True):
            there = {field: value for field, value in zip(fields, values, strict=True) if value is not None}
            if (head := readable_head(name, there)) is not None:
                heads[name] = head
    return heads


async def _chain(redis: Redis, version: int) -> list[TrainedStep]:
    """Up to STEPS_AT_ONCE steps that led to `version`, the last one first; none if no step made it."""
    found: Any = await stored(
        redis.zrange(key_names.STEPS, version, "-inf", desc=True, byscore=True, offset=0, num=STEPS_AT_ONCE)
    )
    steps = [msgspec.json.decode(packed, type=TrainedStep) for packed in found]
    return chain(version, {step.version: step for step in steps})


async def _registered(redis: Redis, versions: Iterable[int]) -> set[int]:
    """Those of these versions that were ever registered."""
    asked = list(versions)
    if not asked:
        return set()
    async with redis.pipeline(transaction=False) as pipeline:
        for version in asked:
            pipeline.hexists(key_names.POLICIES, str(version))
            pipeline.sismember(key_names.REMOVED, str(version))
        replies = await stored(pipeline.execute())
    flags = zip(replies[::2], replies[1::2], strict=True)
    return {version for version, each in zip(asked, flags, strict=True) if any(each)}


SESSIONS_PER_SCRIPT = 20
"""Redis serves nobody else while a script runs, so no script looks at more sessions than this."""


async def progress_of(redis: Redis, session_ids: Sequence[str]) -> list[SessionProgress]:
    """The progress of each session, in the order of `session_ids`. Raises StorageUnavailable.

    A session that does not exist is `decided`, because nobody waits for it.
    """
    found: list[SessionProgress] = []
    for start in range(0, len(session_ids), SESSIONS_PER_SCRIPT):
        names = session_ids[start : start + SESSIONS_PER_SCRIPT]
        replies = await session_scripts.PROGRESS.run(redis, [key_names.session(name) for name in names])
        found += [_progress(name, *reply) for name, reply in zip(names, replies, strict=True)]
    return found


def _progress(
    session_id: str, spec: bytes, outcome: bytes, has_verdict: int, has_reward: int
) -> SessionProgress:
    if not spec:
        return SessionProgress(session_id, "decided")
    try:
        ended = cast(Outcome, decode(outcome)) if outcome else None
        reached = stage(ended, has_verdict=bool(has_verdict), has_reward=bool(has_reward))
        return SessionProgress(session_id, reached, decode_spec(spec), ended)
    except UNREADABLE:
        reached = "decided" if has_verdict else "open"
        if outcome and not has_verdict:
            reached = "ended" if has_reward else "waiting_reward"
        return SessionProgress(session_id, reached, readable=False)
