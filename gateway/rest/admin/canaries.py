"""The operators' routes for canaries and pins."""

from fastapi import APIRouter, Request

from gateway.parts import parts_of
from rollout_queue.contract.policies.canary import Canary, GateReading, Pin
from rollout_queue.http.bodies.json_routes import JsonRoute
from rollout_queue.protocol.canaries import (
    CanaryBody,
    CanaryPage,
    CanaryShape,
    GateShape,
    PinBody,
    Pins,
    PinShape,
)

router = APIRouter(prefix="/policies", route_class=JsonRoute)


@router.get("/canaries")
async def list_canaries(request: Request) -> CanaryPage:
    """The open canary with its numbers so far, and the last ones that ended, the newest first."""
    return CanaryPage(data=tuple(map(canary_shape, await parts_of(request).canaries.last())))


@router.get("/pins")
async def list_pins(request: Request) -> Pins:
    """The servers that keep a version."""
    return _pins((await parts_of(request).policies.plan()).pins)


@router.post("/{version}/canary")
async def begin_canary(version: int, request: Request, body: CanaryBody | None = None) -> CanaryShape:
    """Let a version answer a share of the new groups, until its gates promote it or roll it back."""
    gateway, asked = parts_of(request), body or CanaryBody()
    await gateway.policies.one(version)
    defaults = gateway.settings.canary
    canary = await gateway.canaries.begin(
        version,
        defaults.share if asked.share is None else asked.share,
        asked.sticky or defaults.sticky,
        defaults.gates(**asked.gates.model_dump(exclude_unset=True)),
    )
    return canary_shape(canary)


@router.get("/{version}/canary")
async def get_canary(version: int, request: Request) -> CanaryShape:
    """The last canary of a version, with its numbers."""
    return canary_shape(await parts_of(request).canaries.of(version))


@router.delete("/{version}/canary")
async def end_canary(version: int, request: Request) -> CanaryShape:
    """Roll the open canary of a version back."""
    return canary_shape(await parts_of(request).canaries.end(version))


@router.post("/{version}/pin")
async def pin_policy(version: int, request: Request, body: PinBody | None = None) -> Pins:
    """Have servers keep a version for calls that name it. They take no part in pushes."""
    gateway = parts_of(request)
    await gateway.policies.one(version)
    return _pins(await gateway.canaries.pin(version, (body or PinBody()).servers))


@router.delete("/{version}/pin")
async def unpin_policy(version: int, request: Request) -> Pins:
    """Have the servers of this version follow the fleet again."""
    return _pins(await parts_of(request).canaries.unpin(version))


def canary_shape(canary: Canary) -> CanaryShape:
    return CanaryShape(
        id=canary.id,
        version=canary.version,
        baseline=canary.baseline,
        state=canary.state,
        servers=canary.servers,
        share=canary.share,
        sticky=canary.sticky,
        automatic=canary.automatic,
        started_at=canary.started_at,
        opened_at=canary.opened_at,
        ended_at=canary.ended_at,
        min_groups=canary.gates.min_groups,
        groups=canary.report.groups,
        baseline_groups=canary.report.baseline_groups,
        gates=tuple(map(_gate, canary.report.readings)),
        reason=canary.report.reason,
    )


def _gate(reading: GateReading) -> GateShape:
    return GateShape(
        gate=reading.gate,
        state=reading.state,
        value=reading.value,
        low=reading.low,
        high=reading.high,
        bound=reading.bound,
        count=reading.count,
    )


def pin_shape(pin: Pin) -> PinShape:
    return PinShape(server=pin.server, version=pin.version, since=pin.since)


def _pins(pins: tuple[Pin, ...]) -> Pins:
    return Pins(data=tuple(map(pin_shape, pins)))
