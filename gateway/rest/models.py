"""The models that agents see: the policy under its public name, and one of its versions as `policy@12`."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.errors import NotPermitted
from gateway.generations.pinning import pinned_version
from gateway.rest.shapes import Model, ModelList
from gateway.wiring import GatewayParts, parts_of

router = APIRouter(tags=["agent"])


@router.get("/v1/models", responses={200: {"model": ModelList}})
@router.get("/sessions/{session_id}/v1/models", responses={200: {"model": ModelList}})
async def list_models(request: Request) -> JSONResponse:
    """The policy, under its public name."""
    gateway = _authorized(request)
    return JSONResponse({"object": "list", "data": [_model(gateway.settings.model_name)]})


@router.get("/v1/models/{model:path}", responses={200: {"model": Model}})
@router.get("/sessions/{session_id}/v1/models/{model:path}", responses={200: {"model": Model}})
async def read_model(model: str, request: Request) -> JSONResponse:
    """One model by its name. Unless `strict_models` is set, every other name also means the policy."""
    gateway = _authorized(request)
    pinned_version(gateway.settings, gateway.fleet, model, None)
    return JSONResponse(_model(model))


def _authorized(request: Request) -> GatewayParts:
    """The gateway's parts. Raises UnknownCaller; NotPermitted for a session key on another session's path."""
    gateway = parts_of(request)
    caller = gateway.identities.caller(request.headers)
    if caller.session_id not in (None, request.path_params.get("session_id", caller.session_id)):
        raise NotPermitted("the session key belongs to another session than the path")
    return gateway


def _model(name: str) -> Model:
    return {"id": name, "object": "model", "created": 0, "owned_by": "weir"}
