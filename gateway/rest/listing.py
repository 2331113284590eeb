"""`GET /sessions`: the caller's sessions, a page at a time, and what is left of deleted ones."""

import base64
import math
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from gateway.collaborators import Collaborators
from gateway.rest.shapes import SessionPage
from gateway.rest.views import deleted_row, session_row
from gateway.sessions.sessions import client_of
from rollout_queue.contract.head import SessionHead, State
from rollout_queue.contract.records import VerdictCode
from rollout_queue.contract.tombstone import Tombstone
from rollout_queue.http.errors import ApiError
from rollout_queue.redis.places import START, Place

router = APIRouter(tags=["sessions"])


class Asked(NamedTuple):
    """Which sessions a list is to show; None for any."""

    state: State | None
    group_id: str | None
    user: str | None
    verdict: VerdictCode | None


@router.get("/sessions", responses={200: {"model": SessionPage}})
async def list_sessions(
    request: Request,
    state: State | None = None,
    group_id: str | None = None,
    verdict: VerdictCode | None = None,
    user: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
) -> Response:
    """The caller's sessions, oldest first, a page at a time."""
    gateway, caller = client_of(request)
    asked = Asked(state, group_id, user, verdict)
    place = _place(cursor)
    wanted: list[dict[str, Any]] = []
    while len(wanted) < limit:
        page = await gateway.writer.sessions(place, limit)
        if not page:
            return JSONResponse({"data": wanted, "next_cursor": None})
        for place, session in page:  # noqa: B007 - the last one seen is where the next page begins
            if session is None:
                continue
            if caller.owns(session if isinstance(session, Tombstone) else session.spec):
                wanted += await _rows(gateway, session, asked)
            if len(wanted) == limit:
                break
    return JSONResponse({"data": wanted, "next_cursor": _cursor(place)})


def _cursor(place: Place) -> str:
    """A place as text that a URL may hold as it is."""
    text = f"{place.created_at!r}/{place.session_id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _place(cursor: str | None) -> Place:
    """Raises ApiError 400 for what no list of ours says."""
    if cursor in (None, "0"):
        return START
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        created_at, slash, session_id = text.partition("/")
        place = Place(float(created_at), session_id)
    except ValueError:  # no base64, no text inside, no number
        slash, place = "", START
    if not (slash and math.isfinite(place.created_at)):
        raise ApiError(400, f"{cursor[:300]!r} is no cursor of this list", param="cursor")
    return place


async def _rows(
    gateway: Collaborators, session: SessionHead | Tombstone, asked: Asked
) -> list[dict[str, Any]]:
    """The session, where it is asked for. Of a deleted one nobody knows state, group or user any more."""
    if isinstance(session, Tombstone):
        named = (asked.state, asked.group_id, asked.user)
        wanted = named == (None, None, None) and asked.verdict in (None, "deleted")
        return [deleted_row(session)] if wanted else []
    spec = session.spec
    fits = asked.state in (None, session.state) and asked.group_id in (None, spec.group_id)
    if not fits or asked.user not in (None, spec.user):
        return []
    said = await gateway.sessions.verdict(session)
    if asked.verdict not in (None, said.code):
        return []
    return [session_row(session, said, gateway.settings.model_name)]
