"""The operators' routes for LoRA adapters that are policies of their own."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.generations.pinning import Pinned
from gateway.parts import GatewayParts, parts_of
from rollout_queue.contract.policies.adapter import PublishedAdapter
from rollout_queue.http.bodies.json_routes import JsonRoute
from rollout_queue.protocol.adapters import (
    AdapterBody,
    AdapterPage,
    AdapterPushed,
    AdapterRemoved,
    AdapterRow,
)

router = APIRouter(prefix="/adapters", route_class=JsonRoute)


@router.get("")
async def list_adapters(request: Request) -> AdapterPage:
    """Every adapter, and the servers that have it."""
    gateway = parts_of(request)
    return AdapterPage(data=tuple(_row(each, gateway) for each in await gateway.adapters.all()))


@router.post("", responses={200: {"model": AdapterPushed}, 207: {"model": AdapterPushed}})
async def publish_adapter(body: AdapterBody, request: Request) -> JSONResponse:
    """Publish an adapter, and have every live server load it: 200 if all have, 207 if not."""
    gateway = parts_of(request)
    adapter, results = await gateway.adapters.publish(
        body.name, body.version, body.location, body.manifest_sha256, passing=body.passing
    )
    answer = AdapterPushed(
        name=adapter.name, version=adapter.version, model=_model(adapter, gateway), results=tuple(results)
    )
    return JSONResponse(answer.model_dump(), 200 if all(result.ok for result in results) else 207)


@router.delete("/{name}/{version}")
async def remove_adapter(name: str, version: int, request: Request) -> AdapterRemoved:
    """Remove an adapter: calls cannot name it any more, and servers forget it."""
    await parts_of(request).adapters.remove(name, version)
    return AdapterRemoved(name=name, version=version, removed=True)


def _row(adapter: PublishedAdapter, gateway: GatewayParts) -> AdapterRow:
    servers = gateway.fleet.rollout_servers
    return AdapterRow(
        name=adapter.name,
        version=adapter.version,
        model=_model(adapter, gateway),
        location=adapter.location,
        manifest_sha256=adapter.manifest_sha256,
        created_at=adapter.created_at,
        servers=tuple(each.id for each in servers if each.can_answer(adapter.version, adapter.name)),
    )


def _model(adapter: PublishedAdapter, gateway: GatewayParts) -> str:
    """The model name that calls the adapter."""
    return Pinned(adapter.version, adapter.name).name(gateway.settings.model_name)
