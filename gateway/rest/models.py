"""Names of models: one policy is served, under its public id, and any version of it by `policy@12`."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.collaborators import Collaborators, collaborators
from gateway.rest.shapes import Model, ModelList
from rollout_queue.http.errors import ApiError

router = APIRouter(tags=["agent"])


def pinned_version(gateway: Collaborators, model: str | None, policy: str | None) -> int | None:
    """The version that `policy@12` asks for. Raises ApiError 404 for a model that nobody serves."""
    settings = gateway.settings
    name, at, version = (model or settings.model_name).partition("@")
    if name != settings.model_name:
        if settings.strict_models:
            raise ApiError(404, f"no model {model!r}", param="model", code="model_not_found")
        at = ""  # harnesses hard-code names: any other is served by the policy
    if not at and policy is not None:
        name, at, version = policy.partition("@")
    if not at:
        return None
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        raise ApiError(400, f"{model or policy!r}: a version is a number", param="model")
    if not gateway.fleet.has(int(version)):
        raise ApiError(404, f"no server serves version {version}", param="model", code="model_not_found")
    return int(version)


@router.get("/v1/models", responses={200: {"model": ModelList}})
@router.get("/sessions/{session_id}/v1/models", responses={200: {"model": ModelList}})
async def list_models(request: Request) -> JSONResponse:
    """The policy, under its public id."""
    gateway = _seen(request)
    return JSONResponse({"object": "list", "data": [_model(gateway.settings.model_name)]})


@router.get("/v1/models/{model:path}", responses={200: {"model": Model}})
@router.get("/sessions/{session_id}/v1/models/{model:path}", responses={200: {"model": Model}})
async def read_model(model: str, request: Request) -> JSONResponse:
    """One model by its name; names that agents hard-code are the policy as well."""
    gateway = _seen(request)
    pinned_version(gateway, model, None)
    return JSONResponse(_model(model))


def _seen(request: Request) -> Collaborators:
    """Raises ApiError 401 for a stranger, 403 for a session key on another session's path."""
    gateway = collaborators(request)
    caller = gateway.identities.caller(request.headers)
    if caller.session_id not in (None, request.path_params.get("session_id", caller.session_id)):
        raise ApiError(403, "the session key opens another session than the one named")
    return gateway


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "weir"}
