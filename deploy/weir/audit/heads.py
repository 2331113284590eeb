"""Converts the Redis hash that holds a session's head to a SessionFact, with counts in place of tokens."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache

import msgspec

from rollout_queue.contract.attempts import orphans_of
from rollout_queue.contract.codec import decode, decode_spec
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.records import LateJoin, Outcome, Record, Reward, Turn, Verdict
from rollout_queue.contract.turn_parts.trained_tokens import TrainedTokens
from weir.audit.facts import SessionFact, TurnFact

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
