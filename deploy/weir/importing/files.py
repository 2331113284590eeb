"""Rows out of exported files, each with its place: JSONL by line, Parquet by row."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.rows import DeletedExportRow, ExportRow, row_from_fields, row_from_json
from weir.errors import StackError

PARQUET_MAGIC = b"PAR1"
BATCH_ROWS = 64
JSON_COLUMNS = (("sampling",), ("session", "metadata"))
"""Objects without a fixed shape, which Parquet holds as text."""


class LocatedRow(NamedTuple):
    """A row, or what is wrong with it, and where it stands."""

    place: str
    row: ExportRow | DeletedExportRow | None
    problem: str = ""


def rows_of(files: Sequence[Path]) -> Iterator[LocatedRow]:
    """Every row of all files, one after another: a session may begin in one file and end in the next."""
    for path in files:
        yield from _of_parquet(path) if _is_parquet(path) else _of_lines(path)


def _of_lines(path: Path) -> Iterator[LocatedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _placed(f"{path}:{number}", line, row_from_json)


def _of_parquet(path: Path) -> Iterator[LocatedRow]:
    from pyarrow import ArrowException  # large, and most files are lines
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(path).iter_batches(batch_size=BATCH_ROWS):
            for fields in batch.to_pylist():
                number += 1
                yield _placed(f"{path}: row {number}", fields, _from_parquet)
    except ArrowException as error:
        raise StackError(f"{path} cannot be read as Parquet: {error}") from error


def _from_parquet(fields: dict[str, Any]) -> ExportRow | DeletedExportRow:
    """A null column says nothing: what it stands for is the default."""
    fields = _without_nulls(fields)
    for *path, name in JSON_COLUMNS:
        part = fields
        for step in path:
            part = part.get(step) or {}
        if name in part:
            part[name] = msgspec.json.decode(part[name])
    return row_from_fields(fields)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(each) for each in value]
    return value


def _placed(place: str, given: Any, read: Any) -> LocatedRow:
    try:
        return LocatedRow(place, read(given))
    except (InvalidRecord, UnknownSchema, msgspec.DecodeError, AttributeError, TypeError) as error:
        return LocatedRow(place, None, str(error))


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
