"""The operators' routes: the state of the deployment, the fleet, API keys, images of turns, the pipeline."""

import dataclasses
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from msgspec.structs import asdict
from pydantic import Field

from gateway.callers.backpressure import Backpressure, read_backpressure
from gateway.callers.key_store import NAME, ApiKey, KeyLimits, KeyUse
from gateway.errors import ObjectNotFound
from gateway.fleet.fleet_server import Registration
from gateway.operators.pipeline import PipelineReport
from gateway.operators.warnings import failed_pushes, not_loaded, sessions_are_unknown
from gateway.parts import GatewayParts, parts_of
from gateway.rest import admin_actions, admin_policies, admin_trainer, export
from gateway.rest.access import admins_only
from gateway.rest.bodies import RestBody
from gateway.rest.shapes import KeyPage, KeySecret, KeyShape, NewKeySecret, Removed
from gateway.rest.workers import parts_of_all, placement_of_all, traffic_of_all
from rollout_queue import clock
from rollout_queue.http.callers import Role, default_keys_sentence
from rollout_queue.http.json_routes import JsonRoute
from rollout_queue.http.probe_routes import release
from rollout_queue.http.worker_processes import Siblings
from rollout_queue.protocol.gateway_messages import (
    QueueReport,
    Registered,
    ServerBody,
    ServerPage,
    ServerShape,
    SlowPart,
    SystemStatus,
    TrafficReport,
)
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.plan_store import ServingRegister

router = APIRouter(
    prefix="/admin", tags=["admin"], dependencies=[Depends(admins_only)], route_class=JsonRoute
)
KeyName = Annotated[str, Field(pattern=f"^{NAME.pattern}$", max_length=63)]
Limit = Annotated[int | None, Field(ge=1, le=2**53)]
UNUSED = KeyUse()


class LimitsBody(RestBody):
    """Limits of one key; null: the limit of the deployment, if it has one."""

    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    token_budget: Limit = None

    def limits(self) -> KeyLimits:
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.token_budget)


class NewKeyBody(LimitsBody):
    name: KeyName
    role: Role = "client"


class RotateBody(RestBody):
    keep_s: Annotated[float, Field(ge=0, le=366 * 86400, allow_inf_nan=False)] = 86400.0
    """How long the earlier secrets are still accepted."""


@router.get("/keys")
async def list_keys(request: Request) -> KeyPage:
    """Every key with its limits and its use, without secrets; revoked keys are listed, too."""
    gateway = parts_of(request)
    await gateway.keys.refresh()
    usage = await gateway.key_changes.usage()
    keys = sorted(gateway.keys.all, key=lambda key: key.name)
    return KeyPage(data=[_shape(key, usage.get(key.name, UNUSED)) for key in keys])


@router.post("/keys", status_code=201)
async def create_key(body: NewKeyBody, request: Request) -> NewKeySecret:
    """Make a key. The reply is the only one that has its secret."""
    made = await parts_of(request).key_changes.create(body.name, body.role, body.limits())
    return _with_secret(*made)


@router.post("/keys/{name}/rotate")
async def rotate_key(name: str, body: RotateBody, request: Request) -> NewKeySecret:
    """Give a key a new secret. Its sessions, limits and budget stay."""
    return _with_secret(*await parts_of(request).key_changes.rotate(name, body.keep_s))


@router.put("/keys/{name}/limits")
async def limit_key(name: str, body: LimitsBody, request: Request) -> KeyShape:
    """Set all limits of a key."""
    changes = parts_of(request).key_changes
    return _shape(await changes.limit(name, body.limits()), (await changes.usage()).get(name, UNUSED))


@router.delete("/keys/{name}")
async def revoke_key(name: str, request: Request) -> KeyShape:
    """Refuse a key from now on, and the session keys of its sessions. Its name is never used again."""
    changes = parts_of(request).key_changes
    return _shape(await changes.revoke(name), (await changes.usage()).get(name, UNUSED))


def _shape(key: ApiKey, usage: KeyUse) -> KeyShape:
    return KeyShape(
        name=key.name,
        role=key.role,
        source=key.source,
        secrets=[
            KeySecret(sha256=one.digest[:8], created_at=one.created_at or None, expires_at=one.expires_at)
            for one in key.accepted_secrets(clock.now())
        ],
        requests_per_minute=key.limits.requests_per_minute,
        tokens_per_minute=key.limits.tokens_per_minute,
        token_budget=key.limits.token_budget,
        tokens_used=usage.tokens,
        created_at=key.created_at or None,
        last_used_at=usage.at or None,
        revoked_at=key.revoked_at,
    )


def _with_secret(key: ApiKey, secret: str) -> NewKeySecret:
    return NewKeySecret(name=key.name, role=key.role, api_key=secret)


SLOWEST_PARTS = 5
"""How many parts of the calls the status names."""


router.include_router(export.router)
router.include_router(admin_policies.router)
router.include_router(admin_trainer.router)
router.include_router(admin_actions.router)


@router.get("/status", response_model_exclude_unset=True)
async def status(request: Request) -> SystemStatus:
    """The state of servers, policy, trainer and queue, with warnings as sentences."""
    return await system_status(parts_of(request), request.app.state.siblings)


async def system_status(gateway: GatewayParts, siblings: Siblings) -> SystemStatus:
    """What `GET /admin/status` answers. Raises StorageUnavailable."""
    pressure = await read_backpressure(gateway.redis)
    report, queue = await _redis_state(gateway, pressure)
    last_error = await _last_error(gateway) if queue.dead_letters else None
    warnings = [fault] if (fault := gateway.fleet.fault()) is not None else []
    warnings += gateway.warnings.sentences(report, pressure, queue.dead_letters, last_error)
    warnings += await _push_warnings(gateway)
    warnings += await gateway.lost_keys.warnings()
    warnings += sessions_are_unknown(report, queue.verdicts)
    if defaults := gateway.keys.defaults:
        warnings.append(default_keys_sentence(defaults))
    return SystemStatus(
        rollout_servers=_servers(gateway),
        policy=admin_policies.serving_shape(gateway.fleet.plan),
        trainer=report,
        queue=queue,
        slowest_parts=await _slowest_parts(gateway, siblings),
        traffic=TrafficReport(**asdict(await traffic_of_all(gateway.metrics.traffic, siblings))),
        placement=await placement_of_all(gateway, siblings),
        renderer=gateway.renderer.description,
        model_checks=gateway.renderer.model_checks,
        release=release(),
        warnings=tuple(warnings),
    )


@router.get("/rollout_servers")
async def list_servers(request: Request) -> ServerPage:
    return ServerPage(data=_servers(parts_of(request)))


@router.post("/rollout_servers")
async def register_server(body: ServerBody, request: Request) -> Registered:
    """Register a rollout server. The reply names the policy version that the server has to serve."""
    gateway = parts_of(request)
    registration = Registration(
        id=body.id,
        url=body.url.rstrip("/"),
        engine_url=body.engine_url.rstrip("/"),
        process=body.process,
        forget_after_s=body.forget_after_s,
    )
    known = gateway.fleet.servers.get(body.id)
    request.state.changes_nothing = known is not None and registration.renews(known.registration)
    server = await gateway.fleet.register(registration)
    if server.version is not None and gateway.fleet.serving is None:
        await gateway.policies.note_initial(server.version)
    policy = await gateway.policies.wanted_by(server)
    return Registered(
        id=body.id,
        policy=admin_policies.policy_version(policy) if policy else None,
        adapters=await gateway.adapters.wanted(),
    )


@router.delete("/rollout_servers/{server_id}", responses={200: {"model": Removed}})
async def remove_server(server_id: str, request: Request) -> Response:
    if not await parts_of(request).fleet.remove(server_id):
        raise ObjectNotFound(f"no rollout server {server_id!r}")
    return JSONResponse({"id": server_id, "removed": True})


@router.post("/rollout_servers/{server_id}/drain")
async def drain_server(server_id: str, request: Request) -> ServerShape:
    """Take a server out of rotation. The answers that it is sampling go on."""
    return await _set_drained(request, server_id, drained=True)


@router.post("/rollout_servers/{server_id}/resume")
async def resume_server(server_id: str, request: Request) -> ServerShape:
    return await _set_drained(request, server_id, drained=False)


def _servers(gateway: GatewayParts) -> tuple[ServerShape, ...]:
    return tuple(server.report() for server in gateway.fleet.servers.values())


async def _slowest_parts(gateway: GatewayParts, siblings: Siblings) -> tuple[SlowPart, ...]:
    """The parts that took most seconds over the calls of all dialects and workers, the slowest first."""
    sums = await parts_of_all(gateway.metrics.calls, siblings)
    found = sorted(sums.items(), key=lambda part: -part[1].seconds)[:SLOWEST_PARTS]
    return tuple(SlowPart(part=name, seconds=spent.seconds, runs=spent.runs) for name, spent in found)


async def _set_drained(request: Request, server_id: str, *, drained: bool) -> ServerShape:
    server = await parts_of(request).fleet.set_drained(server_id, drained)
    if server is None:
        raise ObjectNotFound(f"no rollout server {server_id!r}")
    return server.report()


async def _redis_state(gateway: GatewayParts, pressure: Backpressure) -> tuple[TrainerReport, QueueReport]:
    """The trainer's report, and how full the queue is."""
    async with gateway.redis.pipeline(transaction=False) as pipeline:
        pipeline.hgetall(key_names.TRAINER)
        pipeline.xlen(key_names.STREAM)
        pipeline.zcard(key_names.SESSIONS)
        pipeline.zcard(key_names.DEADLINES)
        pipeline.hgetall(key_names.VERDICTS)
        pipeline.xlen(key_names.DEAD_LETTERS)
        report, length, sessions, unfinished, verdicts, dead = await stored(pipeline.execute())
    queue = QueueReport(
        stream_length=length,
        sessions=sessions,
        unfinished_sessions=unfinished,
        verdicts={name.decode(): int(count) for name, count in sorted(verdicts.items())},
        dead_letters=dead,
        used_bytes=pressure.used_bytes,
        max_bytes=pressure.max_bytes,
    )
    return TrainerReport.of(report), queue


async def _push_warnings(gateway: GatewayParts) -> list[str]:
    plan = await gateway.policies.plan()
    servers = (await gateway.policies.report(plan.push)).servers if plan.push is not None else ()
    found = list(failed_pushes(plan, await gateway.policies.last_pushes(), servers))
    noted = ServingRegister(gateway.redis)
    for push, version in {pin.id: pin.version for pin in plan.pins}.items():
        found += not_loaded(version, (await noted.server_pushes(push)).values())
    return found


async def _last_error(gateway: GatewayParts) -> str | None:
    """The error of the newest dead letter (an entry of the stream that could not be read)."""
    letters = await stored(gateway.redis.xrevrange(key_names.DEAD_LETTERS, count=1))
    return letters[0][1].get(b"error", b"unknown").decode(errors="replace") if letters else None


@router.get(
    "/images/{sha256}",
    response_class=Response,
    responses={200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def image(sha256: str, request: Request) -> Response:
    """The PNG with this hash, which the turns of `GET /admin/export` name."""
    png = (await parts_of(request).writer.images([sha256])).get(sha256)
    if png is None:
        raise ObjectNotFound(f"no turn shows an image {sha256[:64]!r}")
    return Response(png, media_type="image/png", headers={"cache-control": "private, max-age=3600"})


@router.get("/pipeline", responses={200: {"model": PipelineReport}})
async def pipeline(request: Request) -> Response:
    """Sessions by state and verdict, what groups and the trainer wait for, and a summary in sentences."""
    return JSONResponse(dataclasses.asdict(await parts_of(request).pipeline.report()))
