"""Lists what a client key has made: training runs (models), checkpoints, sessions.

Finds client sessions of the caller's key by their names, metadata and states, the newest first.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from gateway.callers.identity import Caller
from gateway.errors import invalid
from gateway.tinker.door import TinkerDoor, door_of
from gateway.tinker.paths import ClientModel
from gateway.tinker.sdk_bodies import ClientFinishedQuery, SessionSearchBody
from gateway.tinker.store import FoundSession
from gateway.tinker.weights import KeptWeights
from rollout_queue.contract.head import ListPosition
from rollout_queue.http.json_routes import JsonRoute

router = APIRouter(tags=["tinker"], route_class=JsonRoute)

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]
Scope = Literal["owned", "accessible"]
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


@router.get("/training_runs")
async def list_training_runs(
    request: Request,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: str | None = None,
) -> JSONResponse:
    """The models of the caller's key, the newest first."""
    door, caller = door_of(request)
    if project_id is not None:
        raise invalid("project_id", "not served here")
    models, total = await door.store.models(caller, limit, offset)
    runs = [await _run(door, each) for each in models]
    return JSONResponse({"training_runs": runs, "cursor": _cursor(limit, offset, total)})


@router.get("/training_runs/{training_run_id}")
async def get_training_run(
    training_run_id: str, request: Request, access_scope: Scope = "owned"
) -> JSONResponse:
    """One model."""
    door, caller = door_of(request)
    return JSONResponse(await _run(door, await door.store.model(training_run_id, caller)))


@router.get("/training_runs/{training_run_id}/checkpoints")
async def list_checkpoints_of(training_run_id: str, request: Request) -> JSONResponse:
    """The checkpoints of a model, its named weights to sample from, and its exports; the newest first."""
    door, caller = door_of(request)
    model = await door.store.model(training_run_id, caller)
    return JSONResponse(
        {"checkpoints": [_checkpoint(each) for each in await door.store.weights.all_kept(model.model_id)]}
    )


@router.get("/checkpoints")
async def list_checkpoints(request: Request, limit: Limit = 100, offset: Offset = 0) -> JSONResponse:
    """The checkpoints of all models of the caller's key, the newest first."""
    door, caller = door_of(request)
    models, _ = await door.store.models(caller, MOST_MODELS, 0)
    kept = [each for model in models for each in await door.store.weights.all_kept(model.model_id)]
    kept.sort(key=lambda each: -each.kept.created_at)
    page = [_checkpoint(each) for each in kept[offset : offset + limit]]
    return JSONResponse({"checkpoints": page, "cursor": _cursor(limit, offset, len(kept))})


@router.get("/sessions")
async def list_client_sessions(
    request: Request, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> JSONResponse:
    """The ids of the client sessions of the caller's key, the newest first."""
    door, caller = door_of(request)
    return JSONResponse({"sessions": await door.store.session_ids(caller, limit, offset)})


@router.get("/sessions/{session_id}")
async def get_client_session(
    session_id: str, request: Request, access_scope: Scope = "owned"
) -> JSONResponse:
    """What a client session has made."""
    door, caller = door_of(request)
    session = await door.store.session(session_id, caller)
    models, samplers = await door.store.made_in(session)
    return JSONResponse(
        {
            "training_run_ids": models,
            "sampler_ids": samplers,
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }
    )


async def _run(door: TinkerDoor, model: ClientModel) -> dict[str, Any]:
    kept = await door.store.weights.all_kept(model.model_id)
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": model.lora is not None,
        "lora_rank": model.lora and model.lora.rank,
        "corrupted": False,
        "last_request_time": time_of(max([model.created_at, *(each.kept.created_at for each in kept)])),
        "last_checkpoint": _last(kept, "weights"),
        "last_sampler_checkpoint": _last(kept, "sampler_weights"),
        "user_metadata": model.user_metadata,
    }


def _last(kept: Sequence[KeptWeights], kind: str) -> dict[str, Any] | None:
    return next((_checkpoint(each) for each in kept if each.path.kind == kind), None)


def _checkpoint(weights: KeptWeights) -> dict[str, Any]:
    expires_at = weights.expires_at
    return {
        "checkpoint_id": weights.path.kept_as,
        "checkpoint_type": TYPES[weights.path.kind],
        "time": time_of(weights.kept.created_at),
        "tinker_path": str(weights.path),
        "size_bytes": weights.kept.made.size_bytes,
        "public": weights.terms.public,
        "expires_at": None if expires_at is None else time_of(expires_at),
        "user_metadata": weights.terms.user_metadata,
    }


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"limit": limit, "offset": offset, "total_count": total}


def time_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


MOST_MODELS = 1000
"""The newest models whose checkpoints are listed together."""


LOOKED_AT = 5000
"""How many sessions one page looks at. A page that has found fewer than it may then names the next one."""
"""How many models one page reads, and those of one more session."""
AT_ONCE = 200
"""How many records are read at once."""


@router.post("/sessions/search")
async def search_sessions(body: SessionSearchBody, request: Request) -> JSONResponse:
    """The client sessions of the caller's key that fit every filter. `next_cursor` is null at the end."""
    door, caller = door_of(request)
    if body.project_ids is not None:
        raise invalid("project_ids", "not served here")
    if body.owner.type == "user":
        raise invalid("owner", "type user is not served here: a key finds its own")
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
            last = ListPosition(session.created_at, session.session_id)
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
) -> tuple[list[FoundSession], ListPosition | None]:
    """The sessions of a page, and the last one that was looked at; None if no other is left."""
    found: list[FoundSession] = []
    last = None
    if body.cursor is not None:
        last = ListPosition(body.cursor.last_created_at.timestamp(), body.cursor.last_session_id)
    for _ in range(0, LOOKED_AT, AT_ONCE):
        places = await door.store.sessions_after(caller, last, AT_ONCE)
        for each in await door.store.found_sessions([place.session_id for place in places], caller):
            if _fits(body, each):
                if len(found) == body.limit:
                    return found, last
                found.append(each)
            last = ListPosition(each.session.created_at, each.session.session_id)
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
