"""Reads the rows of exported files, JSONL or Parquet, each with its position in the file."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.rows import DeletedExportRow, ExportRow, row_from_fields, row_from_json
from rollout_queue.foreign_json import read_json
from weir.errors import StackError

Source = TypeVar("Source")

PARQUET_MAGIC = b"PAR1"
BATCH_ROWS = 64
JSON_COLUMNS = (("sampling",), ("session", "metadata"))
"""Objects without a fixed schema, which Parquet files hold as JSON text."""


class LocatedRow(NamedTuple):
    """A row with its location, as `file:line` or `file: row number`. `row` is None if it cannot be read."""

    location: str
    row: ExportRow | DeletedExportRow | None
    problem: str = ""


def rows_of(files: Sequence[Path]) -> Iterator[LocatedRow]:
    """Every row of all files in order, because a session may begin in one file and end in the next."""
    for path in files:
        yield from _of_parquet(path) if _is_parquet(path) else _of_lines(path)


def _of_lines(path: Path) -> Iterator[LocatedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _located(f"{path}:{number}", line, row_from_json)


def _of_parquet(path: Path) -> Iterator[LocatedRow]:
    from pyarrow import ArrowException  # slow to import, and most files are JSONL
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(path).iter_batches(batch_size=BATCH_ROWS):
            for fields in batch.to_pylist():
                number += 1
                yield _located(f"{path}: row {number}", fields, _from_parquet)
    except ArrowException as error:
        raise StackError(f"{path} cannot be read as Parquet: {error}") from error


def _from_parquet(fields: dict[str, Any]) -> ExportRow | DeletedExportRow:
    """The row of these columns. A null column means the field's default."""
    fields = _without_nulls(fields)
    for *path, name in JSON_COLUMNS:
        part = fields
        for step in path:
            part = part.get(step) or {}
        if name in part:
            part[name] = read_json(part[name])
    return row_from_fields(fields)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(each) for each in value]
    return value


def _located(
    location: str, source: Source, read: Callable[[Source], ExportRow | DeletedExportRow]
) -> LocatedRow:
    try:
        return LocatedRow(location, read(source))
    except (InvalidRecord, UnknownSchema, msgspec.DecodeError, AttributeError, TypeError) as error:
        return LocatedRow(location, None, str(error))


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
