"""Lists what a client key has made: training runs (models), checkpoints, sessions."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from gateway.errors import InvalidRequest
from gateway.rest.tinker_api.door import TinkerDoor, door_of
from gateway.rest.tinker_api.records import ClientModel
from gateway.rest.tinker_api.weights import KeptWeights

router = APIRouter(tags=["tinker"])

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
        raise InvalidRequest("project_id: not served here", param="project_id")
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
