"""The models that agents see: the policy, its versions as `policy@12`, adapters as `policy:name@3`.

Stored responses of `/v1/responses`: reads and deletes them, lists what they answered, cancels them.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from gateway.dialects.stored_responses import ResponseStore, StoredResponse, as_of_now, cancel
from gateway.errors import ObjectNotFound, invalid
from gateway.fleet.fleet import Fleet
from gateway.generations.generation import Pinned, pinned
from gateway.parts import GatewayParts, parts_of
from gateway.rest.access import agent_of
from gateway.rest.shapes import DeletedResponse, ItemList, Model, ModelList

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


PATHS = ("/v1/responses/{response_id}", "/sessions/{session_id}/v1/responses/{response_id}")
HARMLESS = frozenset({"include_obfuscation"})
"""Parameters of OpenAI's contract that ask for nothing here: no event is padded."""


@router.get(PATHS[0])
@router.get(PATHS[1])
async def read_response(response_id: str, request: Request) -> JSONResponse:
    """A stored response, without logprobs and token ids: the record of its turn has these."""
    _refuse_unknown(request, ())
    store, found = await _found(request, response_id)
    return JSONResponse(await store.body(found))


@router.post(PATHS[0] + "/cancel")
@router.post(PATHS[1] + "/cancel")
async def cancel_response(response_id: str, request: Request) -> JSONResponse:
    """Cancel a response that is made in the background. One that has ended stays as it is."""
    _refuse_unknown(request, ())
    store, found = await _found(request, response_id)
    await cancel(parts_of(request).redis, response_id, found)
    _, found = await _found(request, response_id)
    return JSONResponse(await store.body(found))


@router.delete(PATHS[0], responses={200: {"model": DeletedResponse}})
@router.delete(PATHS[1], responses={200: {"model": DeletedResponse}})
async def delete_response(response_id: str, request: Request) -> JSONResponse:
    """Delete a stored response. Responses that continue it cannot be continued or read any more. The record
    of its turn stays; `DELETE /sessions/{id}` deletes both."""
    _refuse_unknown(request, ())
    store, _ = await _found(request, response_id)
    await store.delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get(PATHS[0] + "/input_items", responses={200: {"model": ItemList}})
@router.get(PATHS[1] + "/input_items", responses={200: {"model": ItemList}})
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> JSONResponse:
    """What the response answered: all items before it, earlier answers included, without `instructions`."""
    _refuse_unknown(request, ("limit", "order", "after"))
    store, found = await _found(request, response_id)
    items = await store.input_items(response_id, found)
    if order == "desc":
        items.reverse()
    start = _after(items, after)
    page = items[start : start + limit]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + limit < len(items),
        }
    )


async def _found(request: Request, response_id: str) -> tuple[ResponseStore, StoredResponse]:
    """The caller's stored responses, and this one. Raises ObjectNotFound."""
    gateway, caller = agent_of(request)
    store = ResponseStore(gateway.redis, caller)
    found = await store.find(response_id, request.path_params.get("session_id"))
    return store, await as_of_now(gateway.redis, response_id, found)


def _after(items: list[dict[str, Any]], after: str | None) -> int:
    """The position after the item with this id. Raises InvalidRequest for an unknown one."""
    if after is None:
        return 0
    for at, item in enumerate(items):
        if item["id"] == after:
            return at + 1
    raise invalid("after", f"no item {after[:80]!r} is in the list")


def _refuse_unknown(request: Request, known: Collection[str]) -> None:
    """Raise InvalidRequest for a parameter that is not served, such as `include` and `stream`."""
    for name, value in request.query_params.multi_items():
        neutral = name in HARMLESS or (name == "stream" and value in ("false", "False", "0"))
        if name not in known and not neutral:
            raise invalid(name, "not served for a stored response")
