"""Stored responses of `/v1/responses`: reads and deletes them, lists what they answered, cancels them."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from gateway.dialects.responses.stored.background import as_of_now, cancel
from gateway.dialects.responses.stored.record import StoredResponse
from gateway.dialects.responses.stored.store import ResponseStore
from gateway.errors import InvalidRequest
from gateway.parts import parts_of
from gateway.rest.access import agent_of
from gateway.rest.shapes import DeletedResponse, ItemList

router = APIRouter(tags=["agent"])

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
    raise InvalidRequest(f"after: no item {after[:80]!r} is in the list", param="after")


def _refuse_unknown(request: Request, known: Collection[str]) -> None:
    """Raise InvalidRequest for a parameter that is not served, such as `include` and `stream`."""
    for name, value in request.query_params.multi_items():
        neutral = name in HARMLESS or (name == "stream" and value in ("false", "False", "0"))
        if name not in known and not neutral:
            raise InvalidRequest(f"{name}: not served for a stored response", param=name)
