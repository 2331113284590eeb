"""The operators' routes for policies: publish, promote, roll back, hold, release, remove.

With `wait=false` the answer to a push is a 202. Then `GET /admin/policies/{version}` has its state.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from gateway.parts import parts_of
from gateway.policies.policies import PushReport
from gateway.rest.admin.canaries import canary_shape, pin_shape
from rollout_queue.contract.policies.policy import PolicyRecord
from rollout_queue.contract.policies.serving import Push, ServerPush, ServingPlan
from rollout_queue.http.bodies.json_routes import JsonRoute
from rollout_queue.protocol.policies import (
    HoldBody,
    HoldShape,
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

PUSHED: dict[int | str, dict[str, type[Pushed]]] = {202: {"model": Pushed}, 207: {"model": Pushed}}
"""202: the push goes on. 207: at least one server did not load the version."""
Wait = Annotated[bool, Query(description="Whether the answer comes once the push has ended.")]

router = APIRouter(prefix="/policies", route_class=JsonRoute)


@router.get("")
async def list_policies(request: Request) -> PolicyPage:
    """Every version that can be served, ascending."""
    policies = parts_of(request).policies
    known = await policies.all()
    return PolicyPage(data=tuple(policy_version(each) for each in known), reserved=await policies.reserved())


@router.post("", responses=PUSHED)
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


@router.get("/pushes")
async def list_pushes(request: Request) -> PushPage:
    """The last pushes that ended, the newest first."""
    pushes = await parts_of(request).policies.last_pushes()
    return PushPage(data=tuple(_push_shape(push) for push in pushes))


@router.get("/serving")
async def serving(request: Request) -> ServingShape:
    """What the fleet serves, what it is to serve, and the last push."""
    return serving_shape(await parts_of(request).policies.plan())


@router.post("/rollback", responses=PUSHED)
async def roll_back(body: RollbackBody, request: Request, response: Response, wait: Wait = True) -> Pushed:
    """Push an earlier version. Unless `hold` is false, later versions are not pushed by themselves."""
    push = await parts_of(request).policies.roll_back(body.to, hold=body.hold)
    return await _pushed(request, response, body.to, push, wait=wait)


@router.post("/hold")
async def hold(request: Request, body: HoldBody | None = None) -> ServingShape:
    """From now on, versions are registered and not pushed. A push that is under way goes on."""
    return serving_shape(await parts_of(request).policies.hold((body or HoldBody()).reason))


@router.post("/release", responses=PUSHED)
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


@router.get("/{version}")
async def get_policy(version: int, request: Request) -> PolicyDetail:
    """A version, its last push, and what each server did in it."""
    policies = parts_of(request).policies
    found = policy_version(await policies.one(version))
    report = await policies.last_report(version)
    if report is None:
        return PolicyDetail(**found.model_dump())
    return PolicyDetail(**found.model_dump(), push=_report_shape(report), results=_results(report))


@router.delete("/{version}")
async def remove_policy(version: int, request: Request) -> PolicyRemoved:
    """Forget a version before its files are removed. A version that is needed is a 409."""
    await parts_of(request).policies.remove(version)
    return PolicyRemoved(version=version, removed=True)


@router.post("/{version}/promote", responses=PUSHED)
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
