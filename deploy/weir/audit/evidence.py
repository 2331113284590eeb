"""Reads the evidence of an audit: first Redis, in parts, and then the trainer's ledger.

The ledger comes last, because a step becomes durable before a session's head says that the step trained a
turn. A head is everything that Redis stores about a session. The trainer gives its ledger; if it does not
answer, the checkpoints do:

{directory}/CURRENT ─▶ {directory}/{tag}/state.json ─▶ the first `ledger_bytes` of {directory}/ledger.jsonl

Bytes after `ledger_bytes` belong to a checkpoint that was not finished, so they are not durable. The audit
checks the trainer's code, so it does not use that code to read the files.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from rollout_queue.contract.codec import decode, decode_spec
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.head import Tombstone, decode_tombstone, field_of
from rollout_queue.contract.outcomes import orphans_of
from rollout_queue.contract.packed_tokens import TrainedTokens
from rollout_queue.contract.records import LateJoin, Outcome, Record, Reward, Turn, Verdict
from rollout_queue.foreign_json import read_json
from rollout_queue.http.callers import bearer
from rollout_queue.redis import key_names
from rollout_queue.redis.losses import losses_in
from rollout_queue.redis.redis_client import open_redis
from weir.audit.audit_facts import (
    ClientAnswer,
    Evidence,
    GroupFact,
    Ledger,
    LedgerRow,
    SessionFact,
    StreamFact,
    TurnFact,
)
from weir.audit.audit_sources import Sources
from weir.errors import StackError

PAGE = 1000
TRAINER_TIMEOUT_S = 30.0


class EvidenceMissing(StackError):
    """A part of the evidence cannot be read, so the audit has no result."""


class _LedgerPage(msgspec.Struct, frozen=True):
    data: list[LedgerRow]
    next_cursor: str | None


class _CheckpointState(msgspec.Struct, frozen=True):
    ledger_bytes: int


def read_ledger(trainer_url: str | None, admin_key: str | None, directory: Path | None) -> Ledger:
    """Every durable row. Raises EvidenceMissing when neither the trainer nor `directory` has them."""
    absence = "no trainer is given"
    if trainer_url is not None:
        try:
            return Ledger(tuple(_served(trainer_url, admin_key)), f"{trainer_url}/ledger")
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            absence = f"the trainer at {trainer_url} does not return its ledger: {error}"
    if directory is None or not directory.is_dir():
        where = "" if directory is None else f", and {directory} is not a directory of checkpoints"
        raise EvidenceMissing(f"{absence}{where}")
    return Ledger(
        tuple(_filed(directory)), str(directory), f"{absence}; the ledger was read from its checkpoints"
    )


def _served(url: str, admin_key: str | None) -> Iterator[LedgerRow]:
    headers = bearer(admin_key)
    with httpx.Client(base_url=url, headers=headers, timeout=TRAINER_TIMEOUT_S) as client:
        # Until it has restored its checkpoint, a trainer returns an empty ledger.
        client.get("/ready").raise_for_status()
        cursor: str | None = "0"
        while cursor is not None:
            answer = client.get("/ledger", params={"since": cursor, "limit": PAGE}).raise_for_status()
            page = read_json(answer.content, _LedgerPage)
            yield from page.data
            cursor = page.next_cursor


def _filed(directory: Path) -> Iterator[LedgerRow]:
    try:
        current = directory / "CURRENT"
        if not current.exists():  # no checkpoint was finished yet
            return
        tag = current.read_text(encoding="utf-8").strip()
        state = msgspec.json.decode((directory / tag / "state.json").read_bytes(), type=_CheckpointState)
        with (directory / "ledger.jsonl").open("rb") as file:
            left = state.ledger_bytes
            while left > 0:
                line = file.readline()
                left -= len(line)
                if left < 0 or not line:
                    raise EvidenceMissing(f"{file.name} is shorter than checkpoint {tag} says")
                yield msgspec.json.decode(line, type=LedgerRow)
    except (OSError, msgspec.DecodeError) as error:
        raise EvidenceMissing(f"the ledger in {directory} cannot be read: {error}") from error


UNREADABLE = (InvalidRecord, UnknownSchema)


def digest(record: bytes) -> bytes:
    """A digest of a record's bytes, which are the same in the stream, in the head and in the dead letters."""
    return hashlib.blake2b(record, digest_size=16).digest()


def session_fact(
    session_id: str, fields: Mapping[bytes, bytes], dead_letters: Mapping[bytes, str]
) -> SessionFact | None:
    """The facts about a session, from the fields of its hash; None if the hash has no spec."""
    if b"spec" not in fields:
        return None
    records, unreadable, set_aside = _records(fields, dead_letters)
    group_id, train = _terms(fields[b"spec"], records.get("outcome"))
    ends = {name for name, record in records.items() if not isinstance(record, Turn)}
    unheard = {name for name in ends if name in set_aside or not _awaited(records[name])}
    return SessionFact(
        session_id=session_id,
        group_id=group_id,
        turns=tuple(_turns(records, fields, train, set_aside)),
        ends=frozenset(ends - unheard),
        unheard=frozenset(unheard),
        verdict=_verdict(fields[b"verdict"]) if b"verdict" in fields else None,
        unreadable=unreadable,
        images=frozenset(
            image.sha256 for each in records.values() if isinstance(each, Turn) for image in each.images
        ),
    )


def _records(
    fields: Mapping[bytes, bytes], dead_letters: Mapping[bytes, str]
) -> tuple[dict[str, Record], dict[str, bytes], set[str]]:
    """The records by field; the digests of undecodable records by field; and the fields of those records that
    are also in the dead letters."""
    records: dict[str, Record] = {}
    unreadable: dict[str, bytes] = {}
    set_aside: set[str] = set()
    for field, value in fields.items():
        if field[:2] in (b"t:", b"r:") or field in (b"outcome", b"joined"):
            name = field.decode()
            try:
                records[name] = decode(value)
            except UNREADABLE:
                unreadable[name] = digest(value)
            if dead_letters and digest(value) in dead_letters:
                set_aside.add(name)
    return records, unreadable, set_aside


def _turns(
    records: Mapping[str, Record], fields: Mapping[bytes, bytes], train: bool, set_aside: set[str]
) -> Iterator[TurnFact]:
    """The turns, oldest first; Redis returns the fields of a hash in any order."""
    turns = [record for record in records.values() if isinstance(record, Turn)]
    orphans = orphans_of(turns)
    for turn in sorted(turns, key=lambda turn: (turn.started_at, turn.turn_id)):
        verdict = fields.get(b"v:" + turn.turn_id.encode())
        yield TurnFact(
            turn_id=turn.turn_id,
            tokens=len(turn.output_ids),
            generation=_generation(turn),
            versions=_versions(tuple({span.version for span in turn.versions})),
            verdict=None if verdict is None else _verdict(verdict),
            barred=_barred(turn, train, turn.turn_id in orphans),
            numbers=_numbers(fields.get(b"n:" + turn.turn_id.encode())),
            set_aside=f"t:{turn.turn_id}" in set_aside,
        )


def _awaited(record: Record) -> bool:
    """Whether a session would wait for ever without the record. The outcome says a late join's group."""
    return not (isinstance(record, LateJoin) or (isinstance(record, Reward) and record.late))


def _terms(spec: bytes, outcome: Record | None) -> tuple[str | None, bool]:
    """The session's group, and whether it may be trained."""
    try:
        known = decode_spec(spec)
    except UNREADABLE:  # a newer build opened the session; the session's outcome repeats both values
        return (outcome.group_id, outcome.train) if isinstance(outcome, Outcome) else (None, True)
    return known.group_id, known.train


def _barred(turn: Turn, session_trains: bool, orphan: bool) -> str | None:
    if orphan:
        return "a retry has replaced it"
    if turn.finish == "abort":
        return "its call was aborted"
    if not (turn.train and session_trains):
        return "it was not for training"
    return None if turn.output_ids else "it has no output"


def _generation(turn: Turn) -> int:
    if turn.completion_id:  # all choices of a completion have this id, but start at different times
        return hash((turn.completion_id, turn.started_at))
    content = (turn.context_ids.tobytes(), turn.output_ids.tobytes(), turn.logprobs.tobytes())
    return hash((turn.session_id, turn.parent_id, turn.started_at, turn.finished_at, *content))


def _numbers(packed: bytes | None) -> int | None:
    """The number of tokens in what a step has stored of a turn; see `TurnFact.numbers`."""
    try:
        return None if packed is None else TrainedTokens.unpack(packed).tokens
    except UnknownSchema:
        return None
    except InvalidRecord:
        return -1


@lru_cache(maxsize=4096)
def _verdict(value: bytes) -> Verdict:
    """Cached, because many turns have equal verdicts."""
    return msgspec.json.decode(value, type=Verdict)


@lru_cache(maxsize=4096)
def _versions(versions: tuple[int, ...]) -> tuple[int, ...]:
    return versions


CHUNK = 100
"""How many heads or stream entries are read at once. They contain all tokens of their turns."""
NAMES = 10_000
"""How many ids are read at once."""
REDIS_TIMEOUT_S = 60.0


def gather(sources: Sources, answers: Sequence[ClientAnswer] = ()) -> Evidence:
    """Read everything once. Raises EvidenceMissing."""
    # The shapes of replies differ between RESP2 and RESP3; every server speaks RESP2.
    redis = open_redis(sources.redis, REDIS_TIMEOUT_S, protocol=2)
    try:
        with redis:
            dead_letters = _dead_letters(redis)
            stream = _stream(redis)
            before, forgotten_before = _counts(redis, key_names.VERDICTS), _counts(redis, key_names.FORGOTTEN)
            known = frozenset(_known_sessions(redis))
            named = known | stream.entries.keys() | {answer.session_id for answer in answers}
            sessions = {fact.session_id: fact for fact in _heads(redis, sorted(named), dead_letters)}
            evidence = Evidence(
                sessions=sessions,
                known_sessions=known,
                stream=stream,
                groups=_groups(redis, sessions.values()),
                counts_before=before,
                counts_after=_counts(redis, key_names.VERDICTS),
                forgotten_before=forgotten_before,
                forgotten_after=_counts(redis, key_names.FORGOTTEN),
                policies=_policies(redis),
                taught=_taught(redis),
                dead_letters=dead_letters,
                tombstones=_tombstones(redis),
                losses=tuple(loss.said for loss in losses_in(_reply(redis.hgetall(key_names.LOSSES)))),
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
        entry_id, packed = raw_id.decode(), fields.get(key_names.STREAM_FIELD, b"")
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
        groups: Any = _reply(redis.xinfo_groups(key_names.STREAM))
    except ResponseError as error:
        if "no such key" in str(error):
            return (0, 0)
        raise
    ours = [group for group in groups if group["name"] == key_names.GROUP.encode()]
    return _place(ours[0]["last-delivered-id"]) if ours else (0, 0)


def _pending(redis: Redis) -> Iterator[bytes]:
    start = "-"
    while True:
        try:
            page: Any = _reply(redis.xpending_range(key_names.STREAM, key_names.GROUP, start, "+", NAMES))
        except ResponseError as error:
            if str(error).startswith("NOGROUP"):
                return
            raise
        yield from (entry["message_id"] for entry in page)
        if len(page) < NAMES:
            return
        start = f"({page[-1]['message_id'].decode()}"


def _entries(redis: Redis, stream: str = key_names.STREAM) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
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
                pipeline.hgetall(key_names.session(session_id))
            heads = pipeline.execute()
        for session_id, fields in zip(chunk, heads, strict=True):
            if (fact := session_fact(session_id, fields, dead_letters)) is not None:
                yield fact


def _known_sessions(redis: Redis) -> Iterator[str]:
    start = 0
    while page := _reply(redis.zrange(key_names.SESSIONS, start, start + NAMES - 1)):
        yield from (name.decode() for name in page)
        start += len(page)


def _groups(redis: Redis, sessions: Iterable[SessionFact]) -> Mapping[str, GroupFact]:
    names = sorted({session.group_id for session in sessions if session.group_id is not None})
    found: dict[str, GroupFact] = {}
    for chunk in _chunks(names):
        with redis.pipeline(transaction=False) as pipeline:
            for name in chunk:
                pipeline.hmget(key_names.group(name), "size", "forgotten")
                pipeline.smembers(key_names.group_members(name))  # bounded: the sessions that were read
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
                pipeline.exists(key_names.image(sha256))
            found = pipeline.execute()
        missing.update(sha256 for sha256, exists in zip(chunk, found, strict=True) if not exists)
    return frozenset(missing)


def _dead_letters(redis: Redis) -> Mapping[bytes, str]:
    letters = _entries(redis, key_names.DEAD_LETTERS)
    return {
        digest(fields.get(key_names.STREAM_FIELD, b"")): entry_id.decode() for entry_id, fields in letters
    }


def _tombstones(redis: Redis) -> Mapping[str, Tombstone]:
    found: Iterator[tuple[bytes, bytes]] = redis.hscan_iter(key_names.DELETED, count=NAMES)
    return {name.decode(): decode_tombstone(value) for name, value in found}


def _policies(redis: Redis) -> frozenset[int]:
    """Every version that was registered, with files or without."""
    versions = [*_reply(redis.hkeys(key_names.POLICIES)), *_reply(redis.smembers(key_names.REMOVED))]
    return frozenset(map(int, versions))


def _taught(redis: Redis) -> Mapping[str, int]:
    found: Iterator[tuple[bytes, float]] = redis.zscan_iter(key_names.TRAINED, count=NAMES)
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
