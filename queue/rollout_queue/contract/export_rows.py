"""Recorded data outside of Redis: one row per turn, complete in itself; sessions to rows, and back.

SessionHead ─ row_of ─▶ ExportRow ──▶ JSONL, Parquet ──▶ ExportRow ─ episode_of ─▶ Episode ─▶ `restore`

The data of the session is repeated in each row. Later builds may add fields. A build that changes the meaning
of a field raises ROW_SCHEMA, and this build refuses its rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.outcomes import DELETED, total
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds, TrainedTokens
from rollout_queue.contract.records import (
    Finish,
    Outcome,
    PastThoughts,
    ReasoningEffort,
    Relation,
    Reward,
    Sampling,
    SamplingPolicy,
    SessionSpec,
    Span,
    Status,
    Turn,
    TurnImage,
    Verdict,
)
from rollout_queue.foreign_json import read_json

ROW_SCHEMA = 1


class RewardPart(msgspec.Struct, frozen=True, kw_only=True):
    """One reward of the session, as `GET /sessions/{id}` shows it."""

    value: float
    turn_id: str | None = None
    key: str
    source: str | None = None
    created_at: float
    late: bool = False


class OutcomePart(msgspec.Struct, frozen=True, kw_only=True):
    """How and when the session ended."""

    status: Status
    reason: str | None = None
    created_at: float


class SessionPart(msgspec.Struct, frozen=True, kw_only=True):
    """The session of a row, without its ids."""

    owner: str = ""
    group_size: int | None = None
    policy: str | None = None
    train: bool = True
    train_side_calls: bool = True
    inferred: bool = False
    ttl_s: float = 3600.0
    metadata: dict[str, Any] = {}
    lineage: str | None = None
    sampling: SamplingPolicy = SamplingPolicy()
    reasoning_effort: ReasoningEffort | None = None
    thinking: PastThoughts | None = None
    created_at: float
    turn_count: int
    outcome: OutcomePart | None = None
    reward: float | None = None
    verdict: Verdict


class ExportRow(msgspec.Struct, frozen=True, kw_only=True):
    """One turn with its tokens; or, with a null `turn_id`, a session without turns."""

    schema: int = ROW_SCHEMA
    cursor: str
    session_id: str
    group_id: str | None = None
    task_id: str | None = None
    user: str | None = None
    turn_id: str | None = None
    turn_user: str | None = None
    """The user that the call named; `user` is the one that the session was opened for."""
    parent_id: str | None = None
    completion_id: str = ""
    relation: Relation = "root"
    reason: str | None = None
    side_call: str | None = None
    ignored_fields: tuple[str, ...] = ()
    """The paths of fields of the call that the gateway did not know, and ignored."""
    lineage: str | None = None
    policy: str = "policy"
    created_at: float
    finished_at: float
    finish_reason: Finish | None = None
    engine: str = ""
    context_ids: TokenIds = TokenIds()
    output_ids: TokenIds = TokenIds()
    logprobs: Logprobs = Logprobs()
    versions: tuple[Span, ...] = ()
    sampling: Sampling = Sampling()
    train: bool = True
    attempt: int = 0
    joined_attempt: int = 0
    joined_at: float = 0.0
    retry_of: str | None = None
    orphan_of: str | None = None
    prompt_digest: str = ""
    reply_digest: str = ""
    request_digest: str = ""
    images: tuple[TurnImage, ...] = ()
    """The images among `context_ids`; their bytes are not in the row."""
    advantages: tuple[float, ...] | None = None
    """What the step of the verdict used of each output token, if it was recorded; null in other turns."""
    ratios: tuple[float | None, ...] | None = None
    reward: float | None = None
    rewards: tuple[RewardPart, ...] = ()
    verdict: Verdict
    session: SessionPart


class DeletedExportRow(msgspec.Struct, frozen=True, kw_only=True):
    """What remains of a deleted session."""

    schema: int = ROW_SCHEMA
    cursor: str
    session_id: str
    created_at: float
    deleted_at: float
    verdict: Verdict = DELETED


def _enc_hook(value: Any) -> Any:
    if isinstance(value, TokenIds | Logprobs):
        return value.tolist()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _dec_hook(kind: type, value: Any) -> Any:
    if kind is TokenIds or kind is Logprobs:
        try:
            return kind(value)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"not {kind.__name__}: {error}") from error
    raise NotImplementedError(f"cannot decode {kind.__name__}")


class _RowKind(msgspec.Struct, frozen=True):
    schema: int
    deleted_at: float | None = None


_encoder = msgspec.json.Encoder(enc_hook=_enc_hook)


def row_to_json(row: msgspec.Struct) -> bytes:
    """One JSON line, without the newline. Arrays of token ids and logprobs become lists."""
    return _encoder.encode(row)


def row_from_json(line: bytes) -> ExportRow | DeletedExportRow:
    """The row in `line`. Raises UnknownSchema for a newer schema, InvalidRecord for other content."""
    return _read(lambda kind: read_json(line, kind, dec_hook=_dec_hook))


def row_from_fields(fields: dict[str, Any]) -> ExportRow | DeletedExportRow:
    """The same as `row_from_json`, for a row that is parsed already."""
    return _read(lambda kind: msgspec.convert(fields, kind, dec_hook=_dec_hook))


def _read(decode: Callable[[Any], Any]) -> ExportRow | DeletedExportRow:
    try:
        kind: _RowKind = decode(_RowKind)
        if kind.schema > ROW_SCHEMA or kind.schema < 1:
            raise UnknownSchema(f"row schema {kind.schema}; this build reads schema {ROW_SCHEMA}")
        row: ExportRow | DeletedExportRow = decode(ExportRow if kind.deleted_at is None else DeletedExportRow)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"not a row: {error}") from error
    return row


CLOSING = ("failed", "abandoned", "expired")
"""Verdicts that a gateway gives when a session ends."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """A whole session to be restored. `verdict` is None, or one of CLOSING."""

    spec: SessionSpec
    turns: tuple[Turn, ...] = ()
    rewards: tuple[Reward, ...] = ()
    outcome: Outcome | None = None
    verdict: Verdict | None = None


_TURN_FIELDS = (
    "turn_id",
    "parent_id",
    "completion_id",
    "reason",
    "side_call",
    "ignored_fields",
    "lineage",
    "policy",
    "engine",
    "context_ids",
    "output_ids",
    "logprobs",
    "versions",
    "sampling",
    "train",
    "attempt",
    "joined_attempt",
    "joined_at",
    "retry_of",
    "orphan_of",
    "prompt_digest",
    "reply_digest",
    "request_digest",
    "images",
)
"""Fields that have the same name and meaning in a row and in a turn."""
_SPEC_FIELDS = (
    "owner",
    "group_size",
    "policy",
    "train",
    "train_side_calls",
    "inferred",
    "ttl_s",
    "metadata",
    "lineage",
    "sampling",
    "reasoning_effort",
    "thinking",
    "created_at",
)
_OUTCOME_FIELDS = ("status", "reason", "created_at")
_REWARD_FIELDS = ("value", "turn_id", "key", "source", "created_at", "late")


def session_part(head: SessionHead, verdict: Verdict) -> SessionPart:
    outcome = None if head.outcome is None else OutcomePart(**_fields(head.outcome, _OUTCOME_FIELDS))
    return SessionPart(
        **_fields(head.spec, _SPEC_FIELDS),
        turn_count=len(head.turns),
        outcome=outcome,
        reward=head.reward,
        verdict=verdict,
    )


def row_of(
    head: SessionHead, session: SessionPart, turn: Turn | None, verdict: Verdict, cursor: str
) -> ExportRow:
    """The row of one turn. If `turn` is None, the row of a session without turns."""
    named = _fields(head.spec, ("session_id", "group_id", "task_id", "user"))
    named["rewards"] = tuple(RewardPart(**_fields(reward, _REWARD_FIELDS)) for reward in head.rewards)
    if turn is None:
        at = head.spec.created_at
        return ExportRow(
            **named, cursor=cursor, created_at=at, finished_at=at, verdict=verdict, session=session
        )
    return ExportRow(
        **named,
        **_fields(turn, _TURN_FIELDS),
        relation=head.relation_of(turn),
        turn_user=turn.user,
        created_at=turn.started_at,
        finished_at=turn.finished_at,
        finish_reason=turn.finish,
        cursor=cursor,
        reward=total(head.rewards_of(turn)),
        verdict=verdict,
        session=session,
        **_numbers(head, turn),
    )


def episode_of(rows: Sequence[ExportRow]) -> Episode:
    """The session of these rows. Raises InvalidRecord when turns of it are missing."""
    first = rows[0]
    found = {row.turn_id: _turn(row) for row in rows if row.turn_id is not None}
    if len(found) != first.session.turn_count:
        raise InvalidRecord(
            f"session {first.session_id} has {first.session.turn_count} turns, but {len(found)} are given"
        )
    spec = SessionSpec(
        **_fields(first, ("session_id", "group_id", "task_id", "user")),
        **_fields(first.session, _SPEC_FIELDS),
    )
    outcome, verdict = first.session.outcome, first.session.verdict
    return Episode(
        spec=spec,
        turns=tuple(found.values()),
        rewards=tuple(_reward(first.session_id, part) for part in first.rewards),
        outcome=_outcome(spec, outcome) if outcome else None,
        verdict=_closing(outcome, verdict) if outcome else None,
    )


def renamed(row: ExportRow, prefix: str) -> ExportRow:
    """The same row with `prefix` before the ids of its session, group and turns."""

    def new(name: str | None) -> str | None:
        return None if name is None else prefix + name

    names = {name: new(getattr(row, name)) for name in ("group_id", "turn_id", "parent_id")}
    names |= {name: new(getattr(row, name)) for name in ("retry_of", "orphan_of")}
    rewards = tuple(msgspec.structs.replace(reward, turn_id=new(reward.turn_id)) for reward in row.rewards)
    return msgspec.structs.replace(row, session_id=prefix + row.session_id, rewards=rewards, **names)


def _numbers(head: SessionHead, turn: Turn) -> dict[str, Any]:
    """What a step has stored of the turn's tokens. A restored session has none: it has not been trained."""
    packed = head.trained_tokens.get(turn.turn_id)
    if packed is None:
        return {}
    try:
        found = TrainedTokens.unpack(packed)
    except (InvalidRecord, UnknownSchema):  # of a newer build
        return {}
    lists = {"advantages": found.advantage_list, "ratios": found.ratio_list}
    return {name: None if values is None else tuple(values) for name, values in lists.items()}


def _fields(source: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _turn(row: ExportRow) -> Turn:
    if row.finish_reason is None:
        raise InvalidRecord(f"turn {row.turn_id} has no finish_reason")
    return Turn(
        **_fields(row, ("session_id", "group_id", "task_id", "relation")),
        **_fields(row, _TURN_FIELDS),
        finish=row.finish_reason,
        user=row.turn_user,
        started_at=row.created_at,
        finished_at=row.finished_at,
    )


def _reward(session_id: str, part: RewardPart) -> Reward:
    """The reward with `late` false, because a restored session has not been trained yet."""
    fields = _fields(part, _REWARD_FIELDS) | {"late": False}
    return Reward(session_id=session_id, **fields)


def _outcome(spec: SessionSpec, part: OutcomePart) -> Outcome:
    return Outcome(
        **_fields(spec, ("session_id", "group_id", "group_size", "task_id", "train")),
        **_fields(part, _OUTCOME_FIELDS),
    )


def _closing(outcome: OutcomePart, verdict: Verdict) -> Verdict | None:
    """The verdict that a gateway gives at this outcome; None if the session is to be rewarded or trained."""
    if outcome.status not in ("failed", "abandoned"):
        return None
    return verdict if verdict.code in CLOSING else Verdict(code=outcome.status, detail=outcome.reason or "")
