"""`weir import`: reads the rows of exported files, JSONL or Parquet, each with its position in the file,
collects them into sessions, writes those to Redis, and counts the results.

files ─▶ rows ─▶ sessions (adjacent rows) ─▶ restore ─▶ imported | exists already | refused
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from redis import Redis

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.export_rows import (
    DeletedExportRow,
    Episode,
    ExportRow,
    episode_of,
    renamed,
    row_from_fields,
    row_from_json,
)
from rollout_queue.foreign_json import read_json
from rollout_queue.protocol.conditions import counted
from rollout_queue.protocol.message import ID
from rollout_queue.redis.record_restore import Restored, restore
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


CONFLICTS: dict[Restored, str] = {
    "owner": "its group belongs to another client key",
    "size": "its group exists with another size",
    "full": "its group has all of its sessions already",
    "forgotten": "it or its group was forgotten here, and a trainer may still know it: use --as-new",
}

ReportRefusal = Callable[[str], None]


@dataclass
class ImportReport:
    """How many sessions and turns were imported, skipped and refused."""

    sessions: int = 0
    turns: int = 0
    existing: int = 0
    deleted: int = 0
    refused: int = 0
    groups: Counter[str] = field(default_factory=Counter)
    """How many members a group still lacks, by group id; 0 for a complete one."""

    def sentences(self) -> Iterator[str]:
        yield f"{_sessions(self.sessions, 'was', 'were')} imported, with {counted(self.turns, 'turn')}"
        if self.existing:
            yield f"{_sessions(self.existing, 'exists', 'exist')} already, and did not change"
        if self.deleted:
            yield f"{_sessions(self.deleted, 'was', 'were')} deleted before and not imported"
        if self.refused:
            yield f"{counted(self.refused, 'session or row was', 'sessions or rows were')} refused"
        if partial := sum(missing > 0 for missing in self.groups.values()):
            yield (
                f"{counted(partial, 'group is', 'groups are')} incomplete: the trainer goes on without the "
                "missing members after its group_wait_s"
            )


def _sessions(number: int, one: str, many: str) -> str:
    return counted(number, f"session {one}", f"sessions {many}")


class ReadableRow(NamedTuple):
    """A row and its location."""

    location: str
    row: ExportRow | DeletedExportRow


def import_files(
    redis: Redis, files: Sequence[Path], prefix: str, strict: bool, report_refusal: ReportRefusal
) -> ImportReport:
    """Import the files. `prefix` is put before all ids.

    Raises StackError at the first refusal if `strict`; otherwise calls `report_refusal` for each.
    """
    report = ImportReport()

    def refuse(location: str, why: str) -> None:
        report.refused += 1
        if strict:
            raise StackError(f"{location}: {why}")
        report_refusal(f"{location}: {why}")

    for _, gathered in groupby(_readable(rows_of(files), refuse), lambda located: located.row.session_id):
        first, *rest = gathered
        if isinstance(first.row, DeletedExportRow):
            report.deleted += 1
            continue
        try:
            episode = _episode(
                [each.row for each in (first, *rest) if isinstance(each.row, ExportRow)], prefix
            )
        except InvalidRecord as error:
            refuse(first.location, str(error))
            continue
        reply = restore(redis, episode)
        if why := CONFLICTS.get(reply):
            refuse(first.location, f"session {episode.spec.session_id}: {why}")
        _count(report, episode, reply)
    return report


def _readable(rows: Iterator[LocatedRow], refuse: Callable[[str, str], None]) -> Iterator[ReadableRow]:
    """The rows that can be read. A session that lacks rows because of this is refused later."""
    for located in rows:
        if located.row is None:
            refuse(located.location, located.problem)
        else:
            yield ReadableRow(located.location, located.row)


def _episode(rows: list[ExportRow], prefix: str) -> Episode:
    episode = episode_of([renamed(row, prefix) for row in rows] if prefix else rows)
    spec = episode.spec
    for name in (spec.session_id, spec.group_id, spec.task_id, spec.user):
        if name is not None and not ID.fullmatch(name):
            raise InvalidRecord(f"{name!r} is not a valid id")
    known = {turn.turn_id for turn in episode.turns}
    for turn in episode.turns:
        if turn.parent_id is not None and turn.parent_id not in known:
            raise InvalidRecord(f"turn {turn.turn_id} continues {turn.parent_id}, which is missing")
    return episode


def _count(report: ImportReport, episode: Episode, reply: Restored) -> None:
    spec = episode.spec
    if reply == "restored":
        report.sessions += 1
        report.turns += len(episode.turns)
    report.existing += reply == "exists"
    report.deleted += reply == "deleted"
    if spec.group_id is not None and spec.group_size is not None and reply in ("restored", "exists"):
        report.groups.setdefault(spec.group_id, spec.group_size)
        report.groups[spec.group_id] -= 1
