"""Finds client sessions of the caller's key by their names, metadata and states, the newest first."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.callers.identity import Caller
from gateway.errors import InvalidRequest
from gateway.rest.tinker_api.door import TinkerDoor, door_of
from gateway.rest.tinker_api.management.listing import time_of
from gateway.rest.tinker_api.store import FoundSession, SessionPlace
from gateway.rest.tinker_api.wire.searches import ClientFinishedQuery, SessionSearchBody
from rollout_queue.http.bodies.json_routes import JsonRoute

router = APIRouter(tags=["tinker"], route_class=JsonRoute)

LOOKED_AT = 5000
"""How many sessions one page looks at. A page that has found fewer than it may then names the next one."""
MOST_MODELS = 1000
"""How many models one page reads, and those of one more session."""
AT_ONCE = 200
"""How many records are read at once."""


@router.post("/sessions/search")
async def search_sessions(body: SessionSearchBody, request: Request) -> JSONResponse:
    """The client sessions of the caller's key that fit every filter. `next_cursor` is null at the end."""
    door, caller = door_of(request)
    if body.project_ids is not None:
        raise InvalidRequest("project_ids: not served here", param="project_ids")
    if body.owner.type == "user":
        raise InvalidRequest("owner: type user is not served here: a key finds its own", param="owner")
    if body.session_id is not None and body.display_name is None:
        found, last = await door.store.found_sessions([body.session_id], caller), None
        found = [each for each in found if _fits(body, each)]
    else:
        found, last = await _page(door, caller, body)
    sessions: list[dict[str, Any]] = []
    models_read = 0
    for each in found:
        if models_read >= MOST_MODELS:
            session = found[len(sessions) - 1].session
            last = SessionPlace(session.created_at, session.session_id)
            break
        models, _ = await door.store.made_in(each.session)
        sessions.append(await _summary(door, each, models))
        models_read += len(models)
    return JSONResponse(
        {
            "sessions": sessions,
            "next_cursor": last
            and {"last_created_at": time_of(last.created_at), "last_session_id": last.session_id},
        }
    )


async def _page(
    door: TinkerDoor, caller: Caller, body: SessionSearchBody
) -> tuple[list[FoundSession], SessionPlace | None]:
    """The sessions of a page, and the last one that was looked at; None if no other is left."""
    found: list[FoundSession] = []
    last = None
    if body.cursor is not None:
        last = SessionPlace(body.cursor.last_created_at.timestamp(), body.cursor.last_session_id)
    for _ in range(0, LOOKED_AT, AT_ONCE):
        places = await door.store.sessions_after(caller, last, AT_ONCE)
        for each in await door.store.found_sessions([place.session_id for place in places], caller):
            if _fits(body, each):
                if len(found) == body.limit:
                    return found, last
                found.append(each)
            last = SessionPlace(each.session.created_at, each.session.session_id)
        if len(places) < AT_ONCE:
            return found, None
        last = places[-1]
    return found, last


def _fits(body: SessionSearchBody, found: FoundSession) -> bool:
    session = found.session
    metadata = _texts(session.user_metadata or {})
    if not body.user_metadata.items() <= metadata.items():
        return False
    if body.statuses is not None and not any(_is(found, each) for each in body.statuses):
        return False
    if body.session_id is None and body.display_name is None:
        return True
    name = (session.display_name or "").lower()
    words = (body.display_name or "").lower().split()
    return session.session_id == body.session_id or (words != [] and all(word in name for word in words))


def _is(found: FoundSession, query: Any) -> bool:
    status = _status(found)
    if status is None or status["type"] != query.type:
        return False
    reasons = query.reasons if isinstance(query, ClientFinishedQuery) else None
    return reasons is None or status["reason"]["type"] in reasons


def _status(found: FoundSession) -> dict[str, Any] | None:
    """None for a session whose client was silent for too long."""
    if found.finished is None:
        return None if found.ended else {"type": "active"}
    how = found.finished
    return {"type": "client_finished", "reason": {"type": how["reason"]}, "detail": how["detail"]}


async def _summary(door: TinkerDoor, found: FoundSession, models: Sequence[str]) -> dict[str, Any]:
    session = found.session
    kept = [each for model_id in models for each in await door.store.weights.all_kept(model_id)]
    return {
        "session_id": session.session_id,
        "created_at": time_of(session.created_at),
        "owner": session.owner,
        "project_id": session.project_id or "",
        "status": _status(found),
        "checkpoints_count": len(kept),
        "display_name": session.display_name,
        "user_metadata": None if session.user_metadata is None else _texts(session.user_metadata),
        "checkpoint_storage_bytes": sum(each.kept.made.size_bytes for each in kept),
    }


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The SDK's search knows texts only, so other values are JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}
