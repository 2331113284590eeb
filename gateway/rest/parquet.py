"""Writes rows as a Parquet file, one row group at a time, so that memory never holds the whole file."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from rollout_queue.contract.export_rows import DeletedExportRow, ExportRow
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds

GROUP_ROWS = 1000
GROUP_TOKENS = 2**21
"""A row group is written when it has GROUP_ROWS rows or GROUP_TOKENS tokens: about 16 MB."""

VERDICT = pa.struct(
    [("code", pa.string()), ("detail", pa.string()), ("step", pa.int64()), ("version", pa.int64())]
)
OUTCOME = pa.struct([("status", pa.string()), ("reason", pa.string()), ("created_at", pa.float64())])
SAMPLING = pa.struct(
    [
        ("mode", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("max_tokens", pa.int64()),
        ("own_temperature", pa.bool_()),
    ]
)
SPAN = pa.struct(
    [("version", pa.int64()), ("start", pa.int64()), ("end", pa.int64()), ("engine", pa.string())]
)
IMAGE = pa.struct(
    [
        ("sha256", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("width", pa.int64()),
        ("height", pa.int64()),
        ("grid", pa.list_(pa.int64())),
    ]
)
REWARD = pa.struct(
    [
        ("value", pa.float64()),
        ("turn_id", pa.string()),
        ("key", pa.string()),
        ("source", pa.string()),
        ("created_at", pa.float64()),
        ("late", pa.bool_()),
    ]
)
SESSION = pa.struct(
    [
        ("owner", pa.string()),
        ("group_size", pa.int64()),
        ("policy", pa.string()),
        ("train", pa.bool_()),
        ("train_side_calls", pa.bool_()),
        ("inferred", pa.bool_()),
        ("ttl_s", pa.float64()),
        ("metadata", pa.string()),
        ("lineage", pa.string()),
        ("sampling", SAMPLING),
        ("reasoning_effort", pa.string()),
        ("thinking", pa.string()),
        ("created_at", pa.float64()),
        ("turn_count", pa.int64()),
        ("outcome", OUTCOME),
        ("reward", pa.float64()),
        ("verdict", VERDICT),
    ]
)
COLUMNS: dict[str, pa.DataType] = {
    "schema": pa.int64(),
    "cursor": pa.string(),
    "session_id": pa.string(),
    "group_id": pa.string(),
    "task_id": pa.string(),
    "user": pa.string(),
    "turn_id": pa.string(),
    "turn_user": pa.string(),
    "parent_id": pa.string(),
    "completion_id": pa.string(),
    "relation": pa.string(),
    "reason": pa.string(),
    "side_call": pa.string(),
    "lineage": pa.string(),
    "policy": pa.string(),
    "created_at": pa.float64(),
    "finished_at": pa.float64(),
    "deleted_at": pa.float64(),
    "finish_reason": pa.string(),
    "engine": pa.string(),
    "context_ids": pa.list_(pa.int32()),
    "output_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "versions": pa.list_(SPAN),
    "sampling": pa.string(),
    "train": pa.bool_(),
    "attempt": pa.int64(),
    "joined_attempt": pa.int64(),
    "joined_at": pa.float64(),
    "retry_of": pa.string(),
    "orphan_of": pa.string(),
    "prompt_digest": pa.string(),
    "reply_digest": pa.string(),
    "request_digest": pa.string(),
    "images": pa.list_(IMAGE),
    "ignored_fields": pa.list_(pa.string()),
    "advantages": pa.list_(pa.float32()),
    "ratios": pa.list_(pa.float32()),
    "reward": pa.float64(),
    "rewards": pa.list_(REWARD),
    "verdict": VERDICT,
    "session": SESSION,
}
"""`sampling` and `session.metadata` are JSON text, since their fields are not fixed."""
SCHEMA = pa.schema(list(COLUMNS.items()))


class ParquetStream:
    """Takes rows, and returns the bytes of complete row groups."""

    def __init__(self) -> None:
        self._sink = _Sink()
        self._writer = ParquetWriter(pa.PythonFile(self._sink, mode="w"), SCHEMA, compression="zstd")
        self._rows: list[ExportRow | DeletedExportRow] = []
        self._tokens = 0

    def write(self, rows: Sequence[ExportRow | DeletedExportRow]) -> bytes:
        self._rows += rows
        self._tokens += sum(
            len(row.context_ids) + len(row.output_ids) for row in rows if isinstance(row, ExportRow)
        )
        if len(self._rows) >= GROUP_ROWS or self._tokens >= GROUP_TOKENS:
            self._flush()
        return self._sink.taken()

    def close(self) -> bytes:
        """The bytes of the last row group and the footer."""
        if self._rows:
            self._flush()
        self._writer.close()
        return self._sink.taken()

    def _flush(self) -> None:
        self._writer.write_table(_table(self._rows))
        self._rows, self._tokens = [], 0


class _Sink:
    """A write-only file; `taken` returns and drops the bytes written so far."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, part: Any) -> int:
        self._parts.append(bytes(part))
        return len(self._parts[-1])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def taken(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _table(rows: Sequence[ExportRow | DeletedExportRow]) -> pa.Table:
    plain = [_plain(row) for row in rows]
    columns = []
    for name, kind in COLUMNS.items():
        if name in ("context_ids", "output_ids", "logprobs"):
            columns.append(_numbers([getattr(row, name, None) for row in rows], kind))
        else:
            columns.append(pa.array([fields.get(name) for fields in plain], kind))
    return pa.table(columns, schema=SCHEMA)


def _plain(row: ExportRow | DeletedExportRow) -> dict[str, object]:
    """The fields of a row in pyarrow's types. `_numbers` makes the columns of token lists."""
    fields = msgspec.structs.asdict(row)
    for name in ("versions", "rewards", "verdict", "session", "images"):
        if name in fields:
            fields[name] = msgspec.to_builtins(fields[name])
    if "sampling" in fields:
        fields["sampling"] = msgspec.json.encode(fields["sampling"]).decode()
        fields["session"]["metadata"] = msgspec.json.encode(fields["session"]["metadata"]).decode()
    return fields


def _numbers(lists: Iterable[TokenIds | Logprobs | None], kind: pa.ListType) -> pa.Array:
    """A column of lists, copied from the arrays' memory: no number becomes a Python object."""
    arrays = [(TokenIds() if each is None else each) for each in lists]
    ends = [0, *accumulate(map(len, arrays))]
    packed = pa.py_buffer(b"".join(each.tobytes() for each in arrays))
    values = pa.Array.from_buffers(kind.value_type, ends[-1], [None, packed])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, type=kind)
