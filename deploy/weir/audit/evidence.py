"""Reads the evidence of an audit: first Redis, in parts, and then the trainer's ledger.

The ledger comes last, because a step becomes durable before a session's head says that the step trained a
turn. A head is everything that Redis stores about a session.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from rollout_queue.contract.codec import decode
from rollout_queue.contract.head import field_of
from rollout_queue.contract.tombstone import Tombstone, decode_tombstone
from rollout_queue.foreign_json import read_json
from rollout_queue.redis import keys
from rollout_queue.redis.client.losses import losses_in
from rollout_queue.redis.client.opening import open_redis
from weir.audit.facts import ClientAnswer, Evidence, GroupFact, SessionFact, StreamFact
from weir.audit.heads import UNREADABLE, digest, session_fact
from weir.audit.ledger import EvidenceMissing, read_ledger
from weir.audit.sources import Sources

CHUNK = 100
"""How many heads or stream entries are read at once. They contain all tokens of their turns."""
NAMES = 10_000
"""How many ids are read at once."""
TIMEOUT_S = 60.0


def gather(sources: Sources, answers: Sequence[ClientAnswer] = ()) -> Evidence:
    """Read everything once. Raises EvidenceMissing."""
    # The shapes of replies differ between RESP2 and RESP3; every server speaks RESP2.
    redis = open_redis(sources.redis, TIMEOUT_S, protocol=2)
    try:
        with redis:
            dead_letters = _dead_letters(redis)
            stream = _stream(redis)
            before, forgotten_before = _counts(redis, keys.VERDICTS), _counts(redis, keys.FORGOTTEN)
            known = frozenset(_known_sessions(redis))
            named = known | stream.entries.keys() | {answer.session_id for answer in answers}
            sessions = {fact.session_id: fact for fact in _heads(redis, sorted(named), dead_letters)}
            evidence = Evidence(
                sessions=sessions,
                known_sessions=known,
                stream=stream,
                groups=_groups(redis, sessions.values()),
                counts_before=before,
                counts_after=_counts(redis, keys.VERDICTS),
                forgotten_before=forgotten_before,
                forgotten_after=_counts(redis, keys.FORGOTTEN),
                policies=_policies(redis),
                taught=_taught(redis),
                dead_letters=dead_letters,
                tombstones=_tombstones(redis),
                losses=tuple(loss.said for loss in losses_in(_reply(redis.hgetall(keys.LOSSES)))),
                missing_images=_missing_images(redis, sessions.values()),
                ledger=read_ledger(sources.trainer_url, sources.admin_key, sources.checkpoint_dir),
                answers=tuple(answers),
            )
    except RedisError as error:
        raise EvidenceMissing(f"Redis at {sources.redis_address}: {error}") from error
    except msgspec.DecodeError as error:
        raise EvidenceMissing(f"Redis holds data that this build cannot read: {error}") from error
    return evidence


def read_answers(path: Path) -> list[ClientAnswer]:
    """The answers in a JSONL file. Raises EvidenceMissing if the file or a line of it cannot be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EvidenceMissing(f"{path}: {error}") from error
    answers = []
    for number, line in enumerate(lines, 1):
        try:
            answers += [read_json(line, ClientAnswer)] if line.strip() else []
        except msgspec.DecodeError as error:
            raise EvidenceMissing(f"{path}, line {number}: {error}") from error
    return answers


def _stream(redis: Redis) -> StreamFact:
    last_delivered = _last_delivered(redis)
    pending = set(_pending(redis))
    undelivered = 0
    entries: dict[str, dict[str, tuple[str, ...]]] = {}
    unreadable: dict[str, bytes] = {}
    found = 0
    for raw_id, fields in _entries(redis):
        if raw_id in pending:
            found += 1
        elif _place(raw_id) > last_delivered:
            undelivered += 1
        else:
            continue  # acknowledged, but not trimmed yet
        entry_id, packed = raw_id.decode(), fields.get(keys.STREAM_FIELD, b"")
        try:
            record = decode(packed)
        except UNREADABLE:
            unreadable[entry_id] = digest(packed)
            continue
        held = entries.setdefault(record.session_id, {})
        field = field_of(record)
        held[field] = (*held.get(field, ()), entry_id)
    return StreamFact(
        entries=entries,
        unreadable=unreadable,
        pending=found,
        undelivered=undelivered,
        vanished=len(pending) - found,
    )


def _last_delivered(redis: Redis) -> tuple[int, int]:
    """The id of the last entry that was delivered to a trainer; (0, 0) if there is none."""
    try:
        groups: Any = _reply(redis.xinfo_groups(keys.STREAM))
    except ResponseError as error:
        if "no such key" in str(error):
            return (0, 0)
        raise
    ours = [group for group in groups if group["name"] == keys.GROUP.encode()]
    return _place(ours[0]["last-delivered-id"]) if ours else (0, 0)


def _pending(redis: Redis) -> Iterator[bytes]:
    start = "-"
    while True:
        try:
            page: Any = _reply(redis.xpending_range(keys.STREAM, keys.GROUP, start, "+", NAMES))
        except ResponseError as error:
            if str(error).startswith("NOGROUP"):
                return
            raise
        yield from (entry["message_id"] for entry in page)
        if len(page) < NAMES:
            return
        start = f"({page[-1]['message_id'].decode()}"


def _entries(redis: Redis, stream: str = keys.STREAM) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    start = "-"
    while page := _reply(redis.xrange(stream, start, "+", CHUNK)):
        yield from page
        start = f"({page[-1][0].decode()}"


def _heads(
    redis: Redis, session_ids: Sequence[str], dead_letters: Mapping[bytes, str]
) -> Iterator[SessionFact]:
    for chunk in _chunks(session_ids):
        with redis.pipeline(transaction=False) as pipeline:
            for session_id in chunk:
                pipeline.hgetall(keys.session(session_id))
            heads = pipeline.execute()
        for session_id, fields in zip(chunk, heads, strict=True):
            if (fact := session_fact(session_id, fields, dead_letters)) is not None:
                yield fact


def _known_sessions(redis: Redis) -> Iterator[str]:
    start = 0
    while page := _reply(redis.zrange(keys.SESSIONS, start, start + NAMES - 1)):
        yield from (name.decode() for name in page)
        start += len(page)


def _groups(redis: Redis, sessions: Iterable[SessionFact]) -> Mapping[str, GroupFact]:
    names = sorted({session.group_id for session in sessions if session.group_id is not None})
    found: dict[str, GroupFact] = {}
    for chunk in _chunks(names):
        with redis.pipeline(transaction=False) as pipeline:
            for name in chunk:
                pipeline.hmget(keys.group(name), "size", "forgotten")
                pipeline.smembers(keys.group_members(name))  # bounded: the sessions that were read
            replies = pipeline.execute()
        for name, (size, forgotten), members in zip(chunk, replies[::2], replies[1::2], strict=True):
            members = frozenset(member.decode() for member in members)
            found[name] = GroupFact(int(size) if size else None, members, int(forgotten or 0))
    return found


def _missing_images(redis: Redis, sessions: Iterable[SessionFact]) -> frozenset[str]:
    names = sorted({sha256 for session in sessions for sha256 in session.images})
    missing: set[str] = set()
    for chunk in _chunks(names):
        with redis.pipeline(transaction=False) as pipeline:
            for sha256 in chunk:
                pipeline.exists(keys.image(sha256))
            found = pipeline.execute()
        missing.update(sha256 for sha256, exists in zip(chunk, found, strict=True) if not exists)
    return frozenset(missing)


def _dead_letters(redis: Redis) -> Mapping[bytes, str]:
    letters = _entries(redis, keys.DEAD_LETTERS)
    return {digest(fields.get(keys.STREAM_FIELD, b"")): entry_id.decode() for entry_id, fields in letters}


def _tombstones(redis: Redis) -> Mapping[str, Tombstone]:
    found: Iterator[tuple[bytes, bytes]] = redis.hscan_iter(keys.DELETED, count=NAMES)
    return {name.decode(): decode_tombstone(value) for name, value in found}


def _policies(redis: Redis) -> frozenset[int]:
    """Every version that was registered, with files or without."""
    versions = [*_reply(redis.hkeys(keys.POLICIES)), *_reply(redis.smembers(keys.REMOVED))]
    return frozenset(map(int, versions))


def _taught(redis: Redis) -> Mapping[str, int]:
    found: Iterator[tuple[bytes, float]] = redis.zscan_iter(keys.TRAINED, count=NAMES)
    return {name.decode(): int(version) for name, version in found}


def _counts(redis: Redis, key: str) -> Mapping[str, int]:
    counts: Any = _reply(redis.hgetall(key))  # bounded: a number for each verdict
    return {name.decode(): int(count) for name, count in counts.items()}


def _place(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[start : start + CHUNK] for start in range(0, len(names), CHUNK))


def _reply(reply: Any) -> Any:
    """`reply` without its type: redis-py types synchronous and asynchronous replies alike."""
    return reply
