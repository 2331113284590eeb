"""The operators' routes: the state of the deployment, and the fleet.

`GET /admin/images/{sha256}`: an image that recorded turns show, as the engine got it.

`GET /admin/pipeline`: what sessions, groups and the trainer wait for.
"""

import dataclasses

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from msgspec.structs import asdict

from gateway.callers.backpressure import Backpressure, read_backpressure
from gateway.errors import ObjectNotFound
from gateway.fleet.fleet_server import Registration
from gateway.operators.pipeline import PipelineReport
from gateway.operators.warnings import emptied_redis, failed_pushes, not_loaded
from gateway.parts import GatewayParts, parts_of
from gateway.rest import admin_actions, admin_keys, admin_policies, admin_trainer, export
from gateway.rest.access import admins_only
from gateway.rest.shapes import Removed
from gateway.rest.workers import parts_of_all, placement_of_all, traffic_of_all
from rollout_queue.http.callers import default_keys_sentence
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

SLOWEST_PARTS = 5
"""How many parts of the calls the status names."""


router = APIRouter(
    prefix="/admin", tags=["admin"], dependencies=[Depends(admins_only)], route_class=JsonRoute
)
router.include_router(export.router)
router.include_router(admin_policies.router)
router.include_router(admin_trainer.router)
router.include_router(admin_keys.router)
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
    warnings += emptied_redis(report, queue.verdicts, secret_is_there=await _secret_is_there(gateway))
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


async def _secret_is_there(gateway: GatewayParts) -> bool:
    """Whether Redis has the secret that this gateway found there, or stored, when it started."""
    return gateway.identities.knows_secret(await stored(gateway.redis.get(key_names.SECRET)))


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
