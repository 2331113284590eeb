"""Recorded data outside of Redis: one row per turn, complete in itself.

The data of the session is repeated in each row. Later builds may add fields. A build that changes the meaning
of a field raises ROW_SCHEMA, and this build refuses its rows.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.records import (
    Finish,
    PastThoughts,
    ReasoningEffort,
    Relation,
    Sampling,
    Span,
    Status,
    Verdict,
)
from rollout_queue.contract.sampling import SamplingPolicy
from rollout_queue.contract.tokens import Logprobs, TokenIds
from rollout_queue.contract.turn_parts.images import TurnImage
from rollout_queue.contract.verdicts import DELETED
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
