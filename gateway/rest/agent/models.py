"""The models that agents see: the policy, its versions as `policy@12`, adapters as `policy:name@3`."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.errors import ObjectNotFound
from gateway.fleet.fleet import Fleet
from gateway.generations.pinning import Pinned, pinned
from gateway.parts import GatewayParts
from gateway.rest.access import agent_of
from gateway.rest.shapes import Model, ModelList

router = APIRouter(tags=["agent"])


@router.get("/v1/models", responses={200: {"model": ModelList}})
@router.get("/sessions/{session_id}/v1/models", responses={200: {"model": ModelList}})
async def list_models(request: Request) -> JSONResponse:
    """The policy, under its public name, and the adapters that are policies of their own."""
    gateway, _ = agent_of(request)
    model_name = gateway.settings.model_name
    adapters = [Pinned(each.version, each.name) for each in await gateway.adapters.all()]
    named = [_model(gateway, each.name(model_name), each) for each in (Pinned(), *adapters)]
    return JSONResponse({"object": "list", "data": named})


@router.get("/v1/models/{model:path}", responses={200: {"model": Model}})
@router.get("/sessions/{session_id}/v1/models/{model:path}", responses={200: {"model": Model}})
async def read_model(model: str, request: Request) -> JSONResponse:
    """One model by its name. Unless `strict_models` is set, every other name also means the policy."""
    gateway, _ = agent_of(request)
    found = await pinned(gateway.settings, gateway.fleet, gateway.adapters, model, None)
    return JSONResponse(_model(gateway, model, found))


@router.post("/v1/embeddings", include_in_schema=False)
@router.post("/sessions/{session_id}/v1/embeddings", include_in_schema=False)
async def refuse_embeddings(request: Request) -> None:
    """No embeddings: an engine that generates text computes none."""
    agent_of(request)
    raise ObjectNotFound(
        "this gateway serves a policy that generates text; it computes no embeddings", code="not_supported"
    )


def _model(gateway: GatewayParts, name: str, found: Pinned) -> Model:
    model: Model = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "weir",
        "max_model_len": gateway.renderer.context_length,
        "version": _newest(gateway.fleet) if found.version is None else found.version,
    }
    if found == Pinned() and (notice := gateway.warnings.notice) is not None:
        model["notice"] = notice
    return model


def _newest(fleet: Fleet) -> int | None:
    """The version that answers calls: before the first policy, that with which the engines were started."""
    if fleet.serving is not None:
        return fleet.serving
    return max(
        (server.version for server in fleet.servers.values() if server.version is not None), default=None
    )
