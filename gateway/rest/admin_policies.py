"""The operators' routes for policies: publish, promote, roll back, hold, release, remove.

With `wait=false` the answer to a push is a 202. Then `GET /admin/policies/{version}` has its state.

The operators' routes for canaries and pins.

The operators' routes for LoRA adapters that are policies of their own.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from gateway.generations.generation import Pinned
from gateway.parts import GatewayParts, parts_of
from gateway.policies.policies import PushReport
from rollout_queue.contract.published_policy import PolicyRecord, PublishedAdapter
from rollout_queue.contract.serving_plan import Canary, GateReading, Pin, Push, ServerPush, ServingPlan
from rollout_queue.http.json_routes import JsonRoute
from rollout_queue.protocol.gateway_messages import (
    CanaryBody,
    CanaryPage,
    CanaryShape,
    GateShape,
    HoldBody,
    HoldShape,
    PinBody,
    Pins,
    PinShape,
    PolicyBody,
    PolicyDetail,
    PolicyPage,
    PolicyRemoved,
    PolicyVersion,
    Pushed,
    PushPage,
    PushResult,
    PushShape,
    RollbackBody,
    ServingShape,
)
from rollout_queue.protocol.rollout_server_messages import (
    AdapterBody,
    AdapterPage,
    AdapterPushed,
    AdapterRemoved,
    AdapterRow,
)

router = APIRouter(route_class=JsonRoute)


@router.get("/policies/canaries")
async def list_canaries(request: Request) -> CanaryPage:
    """The open canary with its numbers so far, and the last ones that ended, the newest first."""
    return CanaryPage(data=tuple(map(canary_shape, await parts_of(request).canaries.last())))


@router.get("/policies/pins")
async def list_pins(request: Request) -> Pins:
    """The servers that keep a version."""
    return _pins((await parts_of(request).policies.plan()).pins)


@router.post("/policies/{version}/canary")
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


@router.get("/policies/{version}/canary")
async def get_canary(version: int, request: Request) -> CanaryShape:
    """The last canary of a version, with its numbers."""
    return canary_shape(await parts_of(request).canaries.of(version))


@router.delete("/policies/{version}/canary")
async def end_canary(version: int, request: Request) -> CanaryShape:
    """Roll the open canary of a version back."""
    return canary_shape(await parts_of(request).canaries.end(version))


@router.post("/policies/{version}/pin")
async def pin_policy(version: int, request: Request, body: PinBody | None = None) -> Pins:
    """Have servers keep a version for calls that name it. They take no part in pushes."""
    gateway = parts_of(request)
    await gateway.policies.one(version)
    return _pins(await gateway.canaries.pin(version, (body or PinBody()).servers))


@router.delete("/policies/{version}/pin")
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


PUSHED: dict[int | str, dict[str, type[Pushed]]] = {202: {"model": Pushed}, 207: {"model": Pushed}}
"""202: the push goes on. 207: at least one server did not load the version."""
Wait = Annotated[bool, Query(description="Whether the answer comes once the push has ended.")]


@router.get("/policies")
async def list_policies(request: Request) -> PolicyPage:
    """Every version that can be served, ascending."""
    policies = parts_of(request).policies
    known = await policies.all()
    return PolicyPage(data=tuple(policy_version(each) for each in known), reserved=await policies.reserved())


@router.post("/policies", responses=PUSHED)
async def publish_policy(body: PolicyBody, request: Request, response: Response, wait: Wait = True) -> Pushed:
    """Register a version, and push it to every server, unless the fleet is held."""
    version, push = await parts_of(request).policies.publish(
        body.version,
        body.location,
        body.manifest_sha256,
        body.step,
        size_bytes=body.size_bytes,
        force=body.force,
    )
    return await _pushed(request, response, version, push, wait=wait)


@router.get("/policies/pushes")
async def list_pushes(request: Request) -> PushPage:
    """The last pushes that ended, the newest first."""
    pushes = await parts_of(request).policies.last_pushes()
    return PushPage(data=tuple(_push_shape(push) for push in pushes))


@router.get("/policies/serving")
async def serving(request: Request) -> ServingShape:
    """What the fleet serves, what it is to serve, and the last push."""
    return serving_shape(await parts_of(request).policies.plan())


@router.post("/policies/rollback", responses=PUSHED)
async def roll_back(body: RollbackBody, request: Request, response: Response, wait: Wait = True) -> Pushed:
    """Push an earlier version. Unless `hold` is false, later versions are not pushed by themselves."""
    push = await parts_of(request).policies.roll_back(body.to, hold=body.hold)
    return await _pushed(request, response, body.to, push, wait=wait)


@router.post("/policies/hold")
async def hold(request: Request, body: HoldBody | None = None) -> ServingShape:
    """From now on, versions are registered and not pushed. A push that is under way goes on."""
    return serving_shape(await parts_of(request).policies.hold((body or HoldBody()).reason))


@router.post("/policies/release", responses=PUSHED)
async def release(request: Request, response: Response, wait: Wait = True) -> ServingShape:
    """End a hold, and push the newest version, unless it has to pass through a canary."""
    policies = parts_of(request).policies
    push = await policies.release()
    if push is not None and wait:
        report = await policies.ended(push)
        response.status_code = _status(report, wait=wait)
    elif push is not None:
        response.status_code = 202
    return serving_shape(await policies.plan())


@router.get("/policies/{version}")
async def get_policy(version: int, request: Request) -> PolicyDetail:
    """A version, its last push, and what each server did in it."""
    policies = parts_of(request).policies
    found = policy_version(await policies.one(version))
    report = await policies.last_report(version)
    if report is None:
        return PolicyDetail(**found.model_dump())
    return PolicyDetail(**found.model_dump(), push=_report_shape(report), results=_results(report))


@router.delete("/policies/{version}")
async def remove_policy(version: int, request: Request) -> PolicyRemoved:
    """Forget a version before its files are removed. A version that is needed is a 409."""
    await parts_of(request).policies.remove(version)
    return PolicyRemoved(version=version, removed=True)


@router.post("/policies/{version}/promote", responses=PUSHED)
async def promote_policy(version: int, request: Request, response: Response, wait: Wait = True) -> Pushed:
    """Push a registered version to every server under its own number, and end a hold."""
    push = await parts_of(request).policies.promote(version)
    return await _pushed(request, response, version, push, wait=wait)


def policy_version(record: PolicyRecord) -> PolicyVersion:
    return PolicyVersion(
        version=record.version,
        location=record.location,
        manifest_sha256=record.manifest_sha256,
        step=record.step,
        size_bytes=record.size_bytes,
        created_at=record.created_at,
        state=record.state,
    )


def serving_shape(plan: ServingPlan) -> ServingShape:
    hold = plan.hold
    return ServingShape(
        serving=plan.serving,
        target=plan.target,
        admissible=tuple(each.version for each in plan.admissible),
        hold=None if hold is None else HoldShape(since=hold.since, reason=hold.reason),
        push=None if plan.push is None else _push_shape(plan.push),
        canary=None if plan.active_canary is None else canary_shape(plan.active_canary),
        pins=tuple(map(pin_shape, plan.pins)),
    )


async def _pushed(
    request: Request, response: Response, version: int, push: Push | None, *, wait: bool
) -> Pushed:
    policies = parts_of(request).policies
    if push is None:
        plan = await policies.plan()
        if plan.hold is not None:
            return Pushed(version=version, state="held")
        waits = policies.auto_canary or plan.active_canary is not None
        return Pushed(version=version, state="canary" if waits else "superseded")
    report = await (policies.ended(push) if wait else policies.report(push))
    response.status_code = _status(report, wait=wait)
    return Pushed(
        version=version, state=report.push.state, push=_report_shape(report), results=_results(report)
    )


def _status(report: PushReport, *, wait: bool) -> int:
    if not wait and report.push.state == "pushing":
        return 202
    complete = report.push.state == "serving" and all(each.state == "proved" for each in report.servers)
    return 200 if complete else 207


def _push_shape(push: Push) -> PushShape:
    return PushShape(
        id=push.id,
        version=push.version,
        state=push.state,
        started_at=push.started_at,
        ended_at=push.ended_at,
        error=push.error,
        capacity=push.capacity,
        proved=None,  # set, because the status leaves out what is not
        servers=None,
    )


def _report_shape(report: PushReport) -> PushShape:
    proved = sum(each.state == "proved" for each in report.servers)
    return _push_shape(report.push).model_copy(update={"proved": proved, "servers": len(report.servers)})


def _results(report: PushReport) -> tuple[PushResult, ...]:
    return tuple(_result(each) for each in report.servers)


def _result(server: ServerPush) -> PushResult:
    return PushResult(
        server=server.server,
        ok=server.state == "proved",
        state=server.state,
        version_served=server.version_served,
        paused_s=server.paused_s,
        total_s=server.total_s,
        error=server.error,
    )


@router.get("/adapters")
async def list_adapters(request: Request) -> AdapterPage:
    """Every adapter, and the servers that have it."""
    gateway = parts_of(request)
    return AdapterPage(data=tuple(_row(each, gateway) for each in await gateway.adapters.all()))


@router.post("/adapters", responses={200: {"model": AdapterPushed}, 207: {"model": AdapterPushed}})
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


@router.delete("/adapters/{name}/{version}")
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
