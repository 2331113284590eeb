"""The operator's side: what the system is doing, the fleet, the policies."""

import json
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway.admission.pressure import read_pressure
from gateway.collaborators import Collaborators, collaborators
from gateway.engines.fleet import Registration
from gateway.engines.policies import PushResult, status_of
from gateway.operators import pipeline
from gateway.rest import export
from gateway.rest.shapes import Page, Pushed, Registered, Removed, ServerShape, SystemStatus
from gateway.sessions.sessions import Id
from rollout_queue.contract.policy import PolicyRecord
from rollout_queue.http.errors import ApiError
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

PUSHED: dict[int | str, Any] = {200: {"model": Pushed}, 207: {"model": Pushed}}
"""207: not every server took it."""
LARGEST = 2**53
"""Below it, a number is the same one in every JSON reader."""


class ServerBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    url: str = Field(pattern=r"^https?://")
    engine_url: str = Field(pattern=r"^https?://")
    id: Id


class PolicyBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0)  # 0: no half a surrogate pair

    version: int | None = Field(None, ge=0, lt=LARGEST)
    location: str
    manifest_sha256: str | None = None
    step: int | None = Field(None, ge=0, lt=LARGEST)


class RollbackBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    to: int = Field(ge=0, lt=LARGEST)


def admins_only(request: Request) -> Collaborators:
    gateway = collaborators(request)
    if gateway.identities.caller(request.headers).role != "admin":
        raise ApiError(403, "this path needs an admin key")
    return gateway


router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(admins_only)])
router.include_router(export.router)
router.include_router(pipeline.router)


@router.get("/status", responses={200: {"model": SystemStatus}})
async def status(request: Request) -> Response:
    """One page of truth: servers, policy, trainer, queue, and what to worry about."""
    gateway = collaborators(request)
    trainer, queue = await _redis_state(gateway)
    pressure = await read_pressure(gateway.redis)
    last_error = await _last_error(gateway) if queue["dead_letters"] else None
    warnings = [] if gateway.fleet.choose("") is not None else [gateway.fleet.why_nobody()]
    warnings += gateway.watch.warnings(trainer, pressure, queue["dead_letters"], last_error)
    servers = [server.report() for server in gateway.fleet.servers.values()]
    serving, target = gateway.fleet.serving, gateway.policies.target
    policy = {"serving": serving, "target": serving if target is None else target}
    report = {"rollout_servers": servers, "policy": policy, "trainer": trainer, "queue": queue}
    return JSONResponse({**report, "warnings": warnings})


@router.get("/rollout_servers", responses={200: {"model": Page}})
async def list_servers(request: Request) -> Response:
    servers = [server.report() for server in collaborators(request).fleet.servers.values()]
    return JSONResponse({"data": servers, "next_cursor": None})


@router.post("/rollout_servers", responses={200: {"model": Registered}})
async def register_server(body: ServerBody, request: Request) -> Response:
    """A rollout server says that it is there, and hears which policy it is to serve."""
    gateway = collaborators(request)
    registration = Registration(id=body.id, url=body.url.rstrip("/"), engine_url=body.engine_url.rstrip("/"))
    server = await gateway.fleet.register(registration)
    if server.version is not None and gateway.fleet.serving is None:
        await gateway.policies.note_initial(server.version)
    policy = await gateway.policies.current()
    return JSONResponse({"id": body.id, "policy": msgspec.to_builtins(policy) if policy else None})


@router.delete("/rollout_servers/{server_id}", responses={200: {"model": Removed}})
async def remove_server(server_id: str, request: Request) -> Response:
    if not await collaborators(request).fleet.remove(server_id):
        raise ApiError(404, f"no rollout server {server_id!r}")
    return JSONResponse({"id": server_id, "removed": True})


@router.post("/rollout_servers/{server_id}/drain", responses={200: {"model": ServerShape}})
async def drain_server(server_id: str, request: Request) -> Response:
    """Take a server out of rotation; what it is sampling goes on."""
    return await _hold(request, server_id, held=True)


@router.post("/rollout_servers/{server_id}/resume", responses={200: {"model": ServerShape}})
async def resume_server(server_id: str, request: Request) -> Response:
    return await _hold(request, server_id, held=False)


@router.get("/policies", responses={200: {"model": Page}})
async def list_policies(request: Request) -> Response:
    gateway = collaborators(request)
    return JSONResponse(
        {"data": [_policy(each) for each in await gateway.policies.all()], "next_cursor": None}
    )


@router.post("/policies", responses=PUSHED)
async def publish_policy(body: PolicyBody, request: Request) -> Response:
    """Register a version and push it to every server; 207 when a server failed."""
    policies = collaborators(request).policies
    version, results = await policies.publish(body.version, body.location, body.manifest_sha256, body.step)
    return _pushed(version, results)


@router.post("/policies/{version}/promote", responses=PUSHED)
async def promote_policy(version: int, request: Request) -> Response:
    """Serve a known version everywhere, under its own number."""
    return _pushed(version, await collaborators(request).policies.serve_again(version))


@router.post("/policies/rollback", responses=PUSHED)
async def roll_back(body: RollbackBody, request: Request) -> Response:
    return _pushed(body.to, await collaborators(request).policies.serve_again(body.to))


def _pushed(version: int, results: list[PushResult]) -> Response:
    reply = {"version": version, "results": [msgspec.to_builtins(result) for result in results]}
    return JSONResponse(reply, status_of(results))


def _policy(record: PolicyRecord) -> dict[str, Any]:
    policy: dict[str, Any] = msgspec.to_builtins(record)
    return policy


async def _hold(request: Request, server_id: str, *, held: bool) -> Response:
    server = await collaborators(request).fleet.hold(server_id, held)
    if server is None:
        raise ApiError(404, f"no rollout server {server_id!r}")
    return JSONResponse(server.report())


async def _redis_state(gateway: Collaborators) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the trainer said of itself, and how full the queue is."""
    async with gateway.redis.pipeline(transaction=False) as pipeline:
        pipeline.hgetall(keys.TRAINER)
        pipeline.xlen(keys.STREAM)
        pipeline.zcard(keys.SESSIONS)
        pipeline.zcard(keys.DEADLINES)
        pipeline.hgetall(keys.VERDICTS)
        pipeline.xlen(keys.DEAD_LETTERS)
        said, length, sessions, unfinished, verdicts, dead = await stored(pipeline.execute())
    queue = {
        "stream_length": length,
        "sessions": sessions,
        "unfinished_sessions": unfinished,
        "verdicts": {name.decode(): int(count) for name, count in sorted(verdicts.items())},
        "dead_letters": dead,
    }
    return {name.decode(): _value(value) for name, value in said.items()}, queue


def _value(raw: bytes) -> Any:
    """The trainer reports numbers and JSON as text."""
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()


async def _last_error(gateway: Collaborators) -> str | None:
    """Why the last of the dead letters is one."""
    letters = await stored(gateway.redis.xrevrange(keys.DEAD_LETTERS, count=1))
    return letters[0][1].get(b"error", b"nobody said").decode(errors="replace") if letters else None
