"""`GET /sessions`: a page of the caller's sessions; a deleted session has its id, times and verdict."""

import base64
import math
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from gateway.errors import InvalidRequest
from gateway.rest.access import client_of
from gateway.rest.shapes import DeletedSessionRow, SessionPage, SessionRow
from gateway.rest.views import deleted_row, session_row
from gateway.sessions.identity import Caller
from gateway.wiring import GatewayParts
from rollout_queue.contract.head import SessionHead, SessionState
from rollout_queue.contract.listing import LIST_START, ListPosition
from rollout_queue.contract.records import SessionSpec, Verdict, VerdictCode
from rollout_queue.contract.tombstone import Tombstone

router = APIRouter(tags=["sessions"])

MOST_LOOKED_AT = 5000
"""How many sessions of all owners one request reads at most. It then returns those it found, and a cursor."""


class SessionFilter(NamedTuple):
    """The sessions to list; a field that is None matches every session."""

    state: SessionState | None
    group_id: str | None
    user: str | None
    verdict: VerdictCode | None


@router.get("/sessions", responses={200: {"model": SessionPage}})
async def list_sessions(
    request: Request,
    state: SessionState | None = None,
    group_id: str | None = None,
    verdict: VerdictCode | None = None,
    user: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
) -> Response:
    """A page of the caller's sessions, oldest first."""
    gateway, caller = client_of(request)
    wanted = SessionFilter(state, group_id, user, verdict)
    position, looked_at = _position(cursor), 0
    rows: list[SessionRow | DeletedSessionRow] = []
    while len(rows) < limit and looked_at < MOST_LOOKED_AT:
        page = await gateway.writer.sessions(position, limit, lambda spec: _may_match(caller, spec, wanted))
        if not page:
            return JSONResponse({"data": rows, "next_cursor": None})
        looked_at += len(page)
        heads = [each.found for each in page if isinstance(each.found, SessionHead)]
        verdicts = dict(zip(map(id, heads), await gateway.sessions.verdicts(heads), strict=True))
        for position, session in page:  # noqa: B007 - the next page begins after the last position
            if isinstance(session, SessionHead):
                rows += _rows(gateway, caller, session, verdicts[id(session)], wanted)
            elif session is not None and caller.owns(session):
                rows += _deleted_rows(session, caller, wanted)
            if len(rows) == limit:
                break
    return JSONResponse({"data": rows, "next_cursor": _cursor(position)})


def _may_match(caller: Caller, spec: SessionSpec, wanted: SessionFilter) -> bool:
    """Whether the session may be in the list; only such sessions are read."""
    group_matches = wanted.group_id in (None, spec.group_id)
    return caller.owns(spec) and group_matches and wanted.user in (None, spec.user)


def _cursor(position: ListPosition) -> str:
    """A position in the list, as text that needs no escaping in a URL."""
    text = f"{position.created_at!r}/{position.session_id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _position(cursor: str | None) -> ListPosition:
    """The position that a cursor encodes. Raises InvalidRequest for a malformed cursor."""
    if cursor in (None, "0"):
        return LIST_START
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        created_at, slash, session_id = text.partition("/")
        position = ListPosition(float(created_at), session_id)
    except ValueError:  # not base64, not UTF-8, or no number
        slash, position = "", LIST_START
    if not (slash and math.isfinite(position.created_at)):
        raise InvalidRequest(f"{cursor[:300]!r} is no cursor of this list", param="cursor")
    return position


def _rows(
    gateway: GatewayParts, caller: Caller, session: SessionHead, verdict: Verdict, wanted: SessionFilter
) -> list[SessionRow]:
    """The session's row if the filter matches, else none."""
    if wanted.state not in (None, session.state) or wanted.verdict not in (None, verdict.code):
        return []
    return [session_row(session, caller, verdict, gateway.settings.model_name)]


def _deleted_rows(tombstone: Tombstone, caller: Caller, wanted: SessionFilter) -> list[DeletedSessionRow]:
    """The row of a deleted session if the filter matches, else none. It has no state, group or user."""
    others = (wanted.state, wanted.group_id, wanted.user)
    matches = others == (None, None, None) and wanted.verdict in (None, "deleted")
    return [deleted_row(tombstone, caller)] if matches else []
