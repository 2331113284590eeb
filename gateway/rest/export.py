"""`GET /admin/export`: every turn with its tokens, as a stream that a client can resume at a cursor.

Redis ─▶ archive, some hundred turns at a time ─▶ rows ─▶ JSONL, or row groups of Parquet ─▶ the client

Each batch of sessions is read after the client has received the rows of the batch before.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import FiniteFloat
from starlette.responses import Response

from gateway.errors import InvalidRequest
from gateway.operators.archive import ArchivedSession, position_of, sessions_from
from gateway.sessions.verdicts import turn_verdict
from gateway.wiring import GatewayParts, parts_of
from rollout_queue.contract.episodes import row_of, session_part
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.listing import ListPosition
from rollout_queue.contract.records import Verdict
from rollout_queue.contract.rows import DeletedExportRow, ExportRow, row_to_json
from rollout_queue.http.errors import storage_unavailable

if TYPE_CHECKING:
    from gateway.rest.parquet import ParquetStream

logger = logging.getLogger(__name__)

MEDIA_TYPES = {"jsonl": "application/jsonl", "parquet": "application/vnd.apache.parquet"}

Rows = list[ExportRow | DeletedExportRow]

router = APIRouter()


class Window(NamedTuple):
    """The rows to export: those with since <= created_at < until, after the cursor, at most `limit`."""

    since: float | None
    until: float | None
    after: tuple[ListPosition, str] | None
    """The cursor: the position of its session, and the id of its turn."""
    limit: int | None
    empty: bool
    """Whether to export sessions without any turn as well."""

    def holds(self, row: ExportRow | DeletedExportRow) -> bool:
        late_enough = self.since is None or row.created_at >= self.since
        return late_enough and (self.until is None or row.created_at < self.until)


@router.get(
    "/export",
    response_class=StreamingResponse,
    responses={200: {"content": {name: {"schema": {"type": "string"}} for name in MEDIA_TYPES.values()}}},
)
async def export(
    request: Request,
    form: Annotated[Literal["jsonl", "parquet"], Query(alias="format")] = "jsonl",
    since: FiniteFloat | None = None,
    until: FiniteFloat | None = None,
    cursor: str | None = None,
    limit: Annotated[int | None, Query(ge=1)] = None,
    empty: bool = False,
) -> Response:
    """One row per turn, oldest session first. A deleted session has one row: its id, times and verdict."""
    gateway = parts_of(request)
    if since is not None and until is not None and since > until:
        raise InvalidRequest("since is later than until", param="since")
    window = Window(since, until, await _position(gateway, cursor), limit, empty)
    rows = _rows(gateway, window)
    chunks = _jsonl(rows) if form == "jsonl" else _parquet(rows)
    # The first rows are read before the reply begins, so that an error still has its HTTP status.
    first = await anext(chunks, b"")
    headers = {"content-disposition": f'attachment; filename="weir.{form}"'}
    return StreamingResponse(_chained(first, chunks), media_type=MEDIA_TYPES[form], headers=headers)


async def _position(gateway: GatewayParts, cursor: str | None) -> tuple[ListPosition, str] | None:
    """The position and turn id that a cursor names. Raises InvalidRequest for a wrong cursor."""
    if cursor is None:
        return None
    session_id, slash, turn_id = cursor.partition("/")
    position = await position_of(gateway.redis, session_id) if slash else None
    if position is None:
        message = f"{cursor[:300]!r} is no cursor of this export, or its session has been removed"
        raise InvalidRequest(message, param="cursor")
    return position, turn_id


async def _rows(gateway: GatewayParts, window: Window) -> AsyncIterator[Rows]:
    """The rows of the window in batches. Raises StorageUnavailable."""
    start = window.after and window.after[0]
    left = window.limit
    async for found in sessions_from(gateway.redis, start, window.until):
        heads = [each.head for each in found if each.head is not None]
        known = zip(heads, await gateway.sessions.verdicts(heads), strict=True)
        verdicts = {head.spec.session_id: verdict for head, verdict in known}
        rows = [row for each in found for row in _of_session(each, verdicts, window)]
        if left is not None:
            rows = rows[:left]
            left -= len(rows)
        if rows:
            yield rows
        if left == 0:
            return


def _of_session(
    found: ArchivedSession, verdicts: dict[str, Verdict], window: Window
) -> Iterator[ExportRow | DeletedExportRow]:
    rows = _all_of(found, verdicts, window)
    if window.after is not None and found.session_id == window.after[0].session_id:
        rows = _after(list(rows), window.after[1])
    return filter(window.holds, rows)


def _all_of(
    found: ArchivedSession, verdicts: dict[str, Verdict], window: Window
) -> Iterator[ExportRow | DeletedExportRow]:
    head, tombstone = found.head, found.tombstone
    if tombstone is not None:
        yield DeletedExportRow(
            cursor=f"{found.session_id}/",
            session_id=found.session_id,
            created_at=tombstone.created_at,
            deleted_at=tombstone.deleted_at,
        )
    if head is None:
        return
    verdict = verdicts[found.session_id]
    session = session_part(head, verdict)
    for turn in head.turns:
        own = turn_verdict(head, turn, verdict)
        yield row_of(head, session, turn, own, f"{found.session_id}/{turn.turn_id}")
    if not head.turns and window.empty:
        yield row_of(head, session, None, verdict, f"{found.session_id}/")


def _after(rows: Rows, turn_id: str) -> Iterator[ExportRow | DeletedExportRow]:
    """The rows after the row of this turn; all rows if the session has been deleted since."""
    turn_ids = [row.cursor.partition("/")[2] for row in rows]
    if turn_id in turn_ids:
        return iter(rows[turn_ids.index(turn_id) + 1 :])
    if turn_id and rows and isinstance(rows[0], ExportRow):
        raise InvalidRequest(f"the cursor's session has no turn {turn_id[:300]!r}", param="cursor")
    return iter(rows)


# The two formats


async def _jsonl(rows: AsyncIterator[Rows]) -> AsyncIterator[bytes]:
    """One line of JSON for each row. After an error, the last line is the error body of the REST routes."""
    begun = False
    try:
        async for some in rows:
            # Encoded in a thread, so that the agents' streams do not wait.
            yield await asyncio.to_thread(_lines, some)
            begun = True
    except StorageUnavailable as error:
        if not begun:
            raise
        logger.warning("an export ends early: %s", error)
        yield msgspec.json.encode(storage_unavailable(error).body) + b"\n"


def _lines(rows: Rows) -> bytes:
    return b"".join(row_to_json(row) + b"\n" for row in rows)


async def _parquet(rows: AsyncIterator[Rows]) -> AsyncIterator[bytes]:
    """A Parquet file. An error closes the connection; readers then reject the file, which has no footer."""
    stream = await asyncio.to_thread(_parquet_stream)
    async for some in rows:
        if chunk := await asyncio.to_thread(stream.write, some):
            yield chunk
    yield await asyncio.to_thread(stream.close)


def _parquet_stream() -> "ParquetStream":
    from gateway.rest.parquet import ParquetStream  # pyarrow takes long to import, and few requests need it

    return ParquetStream()


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in rest:
        yield chunk
