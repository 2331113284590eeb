"""`GET /admin/export`: every turn with its tokens, as a stream that anybody may break off and take up again.

Redis ─▶ archive, some hundred turns at a time ─▶ rows ─▶ JSONL, or row groups of Parquet ─▶ the client

Nothing is read that the client has not taken: a response waits for its socket, and this for the response.
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
from gateway.operators.archive import ArchivedSession, place_of, sessions_from
from gateway.sessions.verdicts import turn_verdict
from gateway.wiring import Collaborators, collaborators
from rollout_queue.contract.episodes import row_of, session_part
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.listing import ListPosition
from rollout_queue.contract.records import Verdict
from rollout_queue.contract.rows import DeletedRow, Row, row_to_json
from rollout_queue.http.errors import storage_unavailable

if TYPE_CHECKING:
    from gateway.rest.parquet import ParquetStream

logger = logging.getLogger(__name__)

MEDIA_TYPES = {"jsonl": "application/jsonl", "parquet": "application/vnd.apache.parquet"}

Rows = list[Row | DeletedRow]

router = APIRouter()


class Window(NamedTuple):
    """What is asked for: rows with since <= created_at < until, behind the cursor, no more than `limit`."""

    since: float | None
    until: float | None
    after: tuple[ListPosition, str] | None
    """Place of the session and turn of the last row that the client has."""
    limit: int | None
    empty: bool
    """Also sessions without any turn."""

    def holds(self, row: Row | DeletedRow) -> bool:
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
    """One row per turn, oldest session first; of a deleted session its id, times and verdict."""
    gateway = collaborators(request)
    if since is not None and until is not None and since > until:
        raise InvalidRequest("since is later than until", param="since")
    window = Window(since, until, await _place(gateway, cursor), limit, empty)
    rows = _rows(gateway, window)
    chunks = _jsonl(rows) if form == "jsonl" else _parquet(rows)
    # Whoever cannot be served hears it in a status: the first rows are read before the answer begins.
    first = await anext(chunks, b"")
    headers = {"content-disposition": f'attachment; filename="weir.{form}"'}
    return StreamingResponse(_chained(first, chunks), media_type=MEDIA_TYPES[form], headers=headers)


async def _place(gateway: Collaborators, cursor: str | None) -> tuple[ListPosition, str] | None:
    """Raises InvalidRequest for text that is no row's cursor."""
    if cursor is None:
        return None
    session_id, slash, turn_id = cursor.partition("/")
    place = await place_of(gateway.redis, session_id) if slash else None
    if place is None:
        said = f"{cursor[:300]!r} is no cursor of this export, or one of a session that is forgotten since"
        raise InvalidRequest(said, param="cursor")
    return place, turn_id


async def _rows(gateway: Collaborators, window: Window) -> AsyncIterator[Rows]:
    """Some at a time. Raises StorageUnavailable."""
    start = window.after and window.after[0]
    left = window.limit
    async for found in sessions_from(gateway.redis, start, window.until):
        heads = [each.head for each in found if each.head is not None]
        said = await gateway.sessions.verdicts(heads)
        verdicts = {head.spec.session_id: verdict for head, verdict in zip(heads, said, strict=True)}
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
) -> Iterator[Row | DeletedRow]:
    rows = _all_of(found, verdicts, window)
    if window.after is not None and found.session_id == window.after[0].session_id:
        rows = _behind(list(rows), window.after[1])
    return filter(window.holds, rows)


def _all_of(
    found: ArchivedSession, verdicts: dict[str, Verdict], window: Window
) -> Iterator[Row | DeletedRow]:
    head, stone = found.head, found.tombstone
    if stone is not None:
        yield DeletedRow(
            cursor=f"{found.session_id}/",
            session_id=found.session_id,
            created_at=stone.created_at,
            deleted_at=stone.deleted_at,
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


def _behind(rows: Rows, turn_id: str) -> Iterator[Row | DeletedRow]:
    """What comes after the row of this turn; all that is left where the session was deleted since."""
    places = [row.cursor.partition("/")[2] for row in rows]
    if turn_id in places:
        return iter(rows[places.index(turn_id) + 1 :])
    if turn_id and rows and isinstance(rows[0], Row):
        raise InvalidRequest(f"the cursor's session has no turn {turn_id[:300]!r}", param="cursor")
    return iter(rows)


# The two forms


async def _jsonl(rows: AsyncIterator[Rows]) -> AsyncIterator[bytes]:
    """What goes wrong on the way is the last line, in the contract's shape."""
    begun = False
    try:
        async for some in rows:
            # In a thread: numbers become text, and the streams of agents are not to wait for that.
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
    """A failure breaks the connection off: a file without its end is one that no reader takes for whole."""
    stream = await asyncio.to_thread(_parquet_stream)
    async for some in rows:
        if chunk := await asyncio.to_thread(stream.write, some):
            yield chunk
    yield await asyncio.to_thread(stream.close)


def _parquet_stream() -> "ParquetStream":
    from gateway.rest.parquet import ParquetStream  # pyarrow is large, and few ask for it

    return ParquetStream()


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in rest:
        yield chunk
