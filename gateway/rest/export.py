"""`GET /admin/export`: recorded sessions with their tokens, as a stream that a client can resume at a cursor.

Redis ─▶ archive, some hundred turns at a time ─▶ rows ─▶ JSONL, or row groups of Parquet ─▶ the client

The formats `jsonl` and `parquet` have every turn in Weir's own rows. The others are for other trainers.

Each batch of sessions is read after the client has received the rows of the batch before. `left_out` names
each session and turn that other trainers do not get, with the reason.

Sessions are ordered as in `weir:sessions`: by creation time, then by id. A deleted session keeps its
position. So a position still says how far a reader has come after sessions were added, deleted or forgotten.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import FiniteFloat
from redis.asyncio import Redis
from starlette.responses import Response

from gateway.edge.reply import one_line
from gateway.errors import InvalidRequest
from gateway.parts import GatewayParts, parts_of
from gateway.rest.trainer_rows import PendingRow, TrainedSession, openenv_rows, selected, trl_rows, verl_rows
from gateway.sessions.verdicts import turn_verdict
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.export_rows import DeletedExportRow, ExportRow, row_of, row_to_json, session_part
from rollout_queue.contract.head import LIST_START, ListPosition, SessionHead, Tombstone, decode_tombstone
from rollout_queue.contract.outcomes import DELETED, exclusion
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.http.errors import storage_unavailable
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.session_heads import UNREADABLE, batches, read_head
from rollout_queue.redis.session_lists import field_counts, positions_after

if TYPE_CHECKING:
    from gateway.rest.parquet import ParquetStream


logger = logging.getLogger(__name__)

PAGE = 100
"""Sessions whose sizes are read at once."""
FIELDS_AT_ONCE = 100
"""See `batches`."""


class ArchivedSession(NamedTuple):
    """One session, or its tombstone."""

    session_id: str
    head: SessionHead | None
    tombstone: Tombstone | None


async def position_of(redis: Redis, session_id: str) -> ListPosition | None:
    """The position of a session; None for one that never existed or was forgotten."""
    created_at = await stored(redis.zscore(key_names.SESSIONS, session_id))
    return None if created_at is None else ListPosition(float(created_at), session_id)


async def sessions_from(
    redis: Redis, start: ListPosition | None, until: float | None
) -> AsyncIterator[list[ArchivedSession]]:
    """The sessions from `start` on, itself included, that were created before `until`; in batches.

    Raises StorageUnavailable.
    """
    first = [] if start is None else [start]
    while places := first + await positions_after(redis, start or LIST_START, PAGE):
        names = [name for at, name in places if until is None or at < until]
        for batch in batches(await field_counts(redis, names), FIELDS_AT_ONCE):
            yield await _read(redis, batch)
        if len(names) < len(places):
            return
        first, start = [], places[-1]


async def _read(redis: Redis, names: Sequence[str]) -> list[ArchivedSession]:
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hgetall(key_names.session(name))
        # Read tombstones last: a session that is deleted meanwhile is found as a session or as a tombstone.
        pipeline.hmget(key_names.DELETED, list(names))  # bounded: by the page
        *hashes, tombstones = await stored(pipeline.execute())
    found = []
    for name, tombstone, fields in zip(names, tombstones, hashes, strict=True):
        if tombstone is not None:
            found.append(ArchivedSession(name, None, decode_tombstone(tombstone)))
            continue
        try:
            found.append(ArchivedSession(name, read_head(fields), None))
        except UNREADABLE as error:
            logger.error("session %s is left out of an export: %s", name, error)
    return found


NOTHING_SAMPLED = Verdict(code="not_for_training", detail="no token was sampled")


class LeftOutRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session that trainers do not get (`turn_id` is null), or an untrained turn of one that they get."""

    cursor: str
    created_at: float
    session_id: str
    turn_id: str | None
    verdict: Verdict


def left_out_rows(
    found: ArchivedSession, verdict: Verdict | None, partial_groups: bool
) -> Iterator[PendingRow]:
    """The parts of this session that trainers do not get. `verdict` is None for a deleted session."""
    if found.tombstone is not None:
        yield _row(found.session_id, found.tombstone.created_at, None, DELETED)
    if found.head is None or verdict is None:
        return
    at = found.head.spec.created_at
    session = selected(found.head, verdict, partial_groups)
    if isinstance(session, Verdict):
        yield _row(found.session_id, at, None, session)
        return
    for turn in found.head.turns:
        if turn.turn_id not in session.trained:
            yield _row(found.session_id, at, turn.turn_id, _why_untrained(found.head, turn))


def _why_untrained(head: SessionHead, turn: Turn) -> Verdict:
    return exclusion(turn, head.orphans) or NOTHING_SAMPLED


def _row(session_id: str, created_at: float, turn_id: str | None, verdict: Verdict) -> PendingRow:
    cursor = f"{session_id}/{turn_id or ''}"
    row = LeftOutRow(
        cursor=cursor, created_at=created_at, session_id=session_id, turn_id=turn_id, verdict=verdict
    )
    return PendingRow(cursor, created_at, lambda: (row_to_json(row), b"\n"))


Format = Literal["jsonl", "parquet", "verl", "trl", "openenv", "left_out"]
JSONL, PARQUET = "application/jsonl", "application/vnd.apache.parquet"
FOR_TRAINERS: Mapping[str, Callable[[TrainedSession], Iterator[PendingRow]]] = {
    "verl": verl_rows,
    "trl": trl_rows,
    "openenv": openenv_rows,
}
CHUNK_BYTES = 2**20

Row = ExportRow | DeletedExportRow | PendingRow
RowsOfSession = Callable[[ArchivedSession, Verdict | None], Iterator[Row]]
"""Makes the rows of one session. The verdict is None for a deleted session."""

router = APIRouter()


class Window(NamedTuple):
    """The rows to export: those with since <= created_at < until, after the cursor, at most `limit`."""

    since: float | None
    until: float | None
    after: tuple[ListPosition, str] | None
    """The cursor: the position of its session, and the id of its turn."""
    limit: int | None

    def holds(self, row: Row) -> bool:
        late_enough = self.since is None or row.created_at >= self.since
        return late_enough and (self.until is None or row.created_at < self.until)


@router.get(
    "/export",
    response_class=StreamingResponse,
    responses={200: {"content": {name: {"schema": {"type": "string"}} for name in (JSONL, PARQUET)}}},
)
async def export(
    request: Request,
    form: Annotated[Format, Query(alias="format")] = "jsonl",
    since: FiniteFloat | None = None,
    until: FiniteFloat | None = None,
    cursor: str | None = None,
    limit: Annotated[int | None, Query(ge=1)] = None,
    empty: bool = False,
    partial_groups: bool = False,
) -> Response:
    """Recorded sessions, oldest first.

    `jsonl`, `parquet`: one row per turn. A deleted session has one row: its id, times and verdict. `verl`,
    `trl`: one row per branch of each session that ended with a reward. `openenv`: one row per such session.
    `left_out`: the sessions and turns that the last three leave out, and why.
    """
    gateway = parts_of(request)
    if since is not None and until is not None and since > until:
        raise InvalidRequest("since is later than until", param="since")
    window = Window(since, until, await _position(gateway, cursor), limit)
    if form in ("jsonl", "parquet"):
        if partial_groups:
            raise InvalidRequest(f"format={form} has the sessions of all groups", param="partial_groups")
        rows = _rows(gateway, window, lambda found, verdict: _turn_rows(found, verdict, empty))
    else:
        if empty:
            raise InvalidRequest(f"format={form} has no sessions without turns", param="empty")
        rows = _rows(gateway, window, lambda found, verdict: _for(form, found, verdict, partial_groups))
    chunks = _parquet(rows) if form == "parquet" else _jsonl(rows)
    # The first rows are read before the reply begins, so that an error still has its HTTP status.
    first = await anext(chunks, b"")
    name = f"weir.{form}" if form in ("jsonl", "parquet") else f"weir-{form}.jsonl"
    return StreamingResponse(
        _chained(first, chunks),
        media_type=PARQUET if form == "parquet" else JSONL,
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


async def _position(gateway: GatewayParts, cursor: str | None) -> tuple[ListPosition, str] | None:
    """The position and turn id that a cursor names. Raises InvalidRequest for a wrong cursor."""
    if cursor is None:
        return None
    session_id, slash, turn_id = cursor.partition("/")
    position = await position_of(gateway.redis, session_id) if slash else None
    if position is None:
        message = f"{cursor[:300]!r} is not a cursor of this export, or its session has been removed"
        raise InvalidRequest(message, param="cursor")
    return position, turn_id


async def _rows(
    gateway: GatewayParts, window: Window, rows_of: RowsOfSession
) -> AsyncIterator[Sequence[Row]]:
    """The rows of the window in batches. Raises StorageUnavailable."""
    start = window.after and window.after[0]
    left = window.limit
    async for found in sessions_from(gateway.redis, start, window.until):
        heads = [each.head for each in found if each.head is not None]
        known = zip(heads, await gateway.sessions.verdicts(heads), strict=True)
        verdicts = {head.spec.session_id: verdict for head, verdict in known}
        rows: list[Row] = []
        for each in found:
            of_session = rows_of(each, verdicts.get(each.session_id))
            if window.after is not None and each.session_id == window.after[0].session_id:
                of_session = _after(list(of_session), window.after[1])
            rows += filter(window.holds, of_session)
        if left is not None:
            rows = rows[:left]
            left -= len(rows)
        if rows:
            yield rows
        if left == 0:
            return


def _turn_rows(found: ArchivedSession, verdict: Verdict | None, empty: bool) -> Iterator[Row]:
    """Weir's own rows. `empty`: also one of a session without turns."""
    head, tombstone = found.head, found.tombstone
    if tombstone is not None:
        yield DeletedExportRow(
            cursor=f"{found.session_id}/",
            session_id=found.session_id,
            created_at=tombstone.created_at,
            deleted_at=tombstone.deleted_at,
        )
    if head is None or verdict is None:
        return
    session = session_part(head, verdict)
    for turn in head.turns:
        own = turn_verdict(head, turn, verdict)
        yield row_of(head, session, turn, own, f"{found.session_id}/{turn.turn_id}")
    if not head.turns and empty:
        yield row_of(head, session, None, verdict, f"{found.session_id}/")


def _for(
    form: Format, found: ArchivedSession, verdict: Verdict | None, partial_groups: bool
) -> Iterator[Row]:
    """The rows of one of the formats for other trainers."""
    if form == "left_out":
        yield from left_out_rows(found, verdict, partial_groups)
    elif found.head is not None and verdict is not None:
        session = selected(found.head, verdict, partial_groups)
        if isinstance(session, TrainedSession):
            yield from FOR_TRAINERS[form](session)


def _after(rows: Sequence[Row], turn_id: str) -> Iterator[Row]:
    """The rows after the row of this turn. All rows if the session has one row in place of those of its
    turns, because it has been deleted since, or is left out."""
    turn_ids = [row.cursor.partition("/")[2] for row in rows]
    if turn_id in turn_ids:
        return iter(rows[turn_ids.index(turn_id) + 1 :])
    if turn_id and turn_ids and turn_ids[0]:
        message = f"the cursor's session has no row of turn {turn_id[:300]!r} in this format"
        raise InvalidRequest(message, param="cursor")
    return iter(rows)


# How rows are written


async def _jsonl(rows: AsyncIterator[Sequence[Row]]) -> AsyncIterator[bytes]:
    """One line of JSON for each row. After an error, the last line is the error body of the REST routes."""
    begun = False
    try:
        async for some in rows:
            pieces = chain.from_iterable(map(_line, some))
            # Encoded in a thread, so that the agents' streams do not wait.
            while chunk := await asyncio.to_thread(_chunk, pieces):
                yield chunk
                begun = True
    except StorageUnavailable as error:
        if not begun:
            raise
        logger.warning("an export ends early: %s", error)
        yield msgspec.json.encode(storage_unavailable(error).body) + b"\n"


def _line(row: Row) -> Iterable[bytes]:
    """The line of a row, in pieces."""
    return row.pieces() if isinstance(row, PendingRow) else (row_to_json(row), b"\n")


def _chunk(pieces: Iterator[bytes]) -> bytes:
    """The next pieces, about a megabyte; empty at the end."""
    taken, size = [], 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size >= CHUNK_BYTES:
            break
    return one_line(b"".join(taken))


async def _parquet(rows: AsyncIterator[Sequence[Row]]) -> AsyncIterator[bytes]:
    """A Parquet file. An error closes the connection; readers then reject the file, which has no footer."""
    stream = await asyncio.to_thread(_parquet_stream)
    async for some in rows:
        turns = [row for row in some if not isinstance(row, PendingRow)]
        if chunk := await asyncio.to_thread(stream.write, turns):
            yield chunk
    yield await asyncio.to_thread(stream.close)


def _parquet_stream() -> "ParquetStream":
    # pyarrow takes long to import, and few requests need it.
    from gateway.rest.parquet import ParquetStream

    return ParquetStream()


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in rest:
        yield chunk
