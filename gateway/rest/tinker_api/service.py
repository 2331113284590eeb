"""What a client asks first: the configuration, its session, and which models there are; and the end of it."""

import logging

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gateway.callers.identity import user_named
from gateway.errors import InvalidRequest
from gateway.rest.shapes import DeletedClientSession
from gateway.rest.tinker_api.door import door_of, now
from gateway.rest.tinker_api.records import ClientSession
from gateway.rest.tinker_api.user_data.export import ClientSessionExport
from gateway.rest.tinker_api.wire.bodies import (
    ClientConfigBody,
    ClientFinishBody,
    TinkerHeartbeatBody,
    TinkerSessionBody,
)
from rollout_queue.contract.ids import new_id
from rollout_queue.http.bodies.json_routes import JsonRoute
from rollout_queue.http.errors import ApiError

router = APIRouter(tags=["tinker"], route_class=JsonRoute)
logger = logging.getLogger(__name__)

CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": True,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "create_model_via_load_weights": True,
}
"""What steers the SDK. It has defaults for everything else."""
REFRESH_S = 300


@router.post("/client/config")
async def client_config(body: ClientConfigBody, request: Request) -> JSONResponse:
    """How the SDK is to behave."""
    door_of(request)
    return JSONResponse(CLIENT_CONFIG)


@router.post("/client/dynamic_config")
async def dynamic_config(body: ClientConfigBody, request: Request) -> JSONResponse:
    """What the SDK asks again from time to time."""
    door_of(request)
    return JSONResponse({"refresh_interval_sec": REFRESH_S, "sample_cancel_enabled": True})


@router.get("/healthz")
async def healthz() -> JSONResponse:
    return JSONResponse({"status": "ok"})


@router.post("/telemetry")
async def telemetry(request: Request) -> JSONResponse:
    """The SDK reports its own events. They are not kept."""
    door_of(request)
    return JSONResponse({"status": "accepted"})


@router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request) -> JSONResponse:
    """The one base model of this deployment."""
    door, _ = door_of(request)
    model = {
        "model_name": door.base_model,
        "max_context_length": door.gateway.renderer.context_length,
        "trainable": await door.trains_commands() is not False,
        "sampleable": True,
    }
    return JSONResponse({"supported_models": [model]})


@router.post("/create_session")
async def create_session(body: TinkerSessionBody, request: Request) -> JSONResponse:
    """Begin a client session: one run of a user's loop."""
    door, caller = door_of(request)
    session = ClientSession(
        session_id=f"run-{new_id()}",
        owner=caller.owner,
        created_at=now(),
        sdk_version=body.sdk_version,
        tags=body.tags,
        user_metadata=body.user_metadata,
        project_id=body.project_id,
        display_name=body.display_name,
        user=_user(body),
    )
    await door.store.add_session(session)
    return JSONResponse({"type": "create_session", "session_id": session.session_id})


def _user(body: TinkerSessionBody) -> str | None:
    """The user that the metadata name, in `user`. Raises InvalidRequest for what cannot be one."""
    given = (body.user_metadata or {}).get("user")
    user = user_named(given)
    if user == given:
        return user
    message = f"user_metadata.user: {str(given)[:200]!r}: a user is 1 to 200 of A-Z a-z 0-9 . _ : @ ~ = + -"
    raise InvalidRequest(message, param="user_metadata")


@router.post("/session_heartbeat")
async def session_heartbeat(body: TinkerHeartbeatBody, request: Request) -> JSONResponse:
    """Say that the loop still runs: 410 once its session has finished."""
    door, caller = door_of(request)
    session = await door.store.session(body.session_id, caller)
    if not await door.store.beat(session):
        raise ApiError(410, f"session {session.session_id} has finished")
    return JSONResponse({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, body: ClientFinishBody, request: Request) -> Response:
    """Say how the loop ended. The first of several answers stays."""
    door, caller = door_of(request)
    session = await door.store.session(session_id, caller)
    how = {"reason": body.reason.type, "detail": body.detail, "at": now()}
    await door.store.finish(session, msgspec.json.encode(how))
    return JSONResponse({})


@router.get("/sessions/{session_id}/export", response_class=StreamingResponse)
async def export_client_session(session_id: str, request: Request) -> Response:
    """What is kept of a client session, as lines of JSON."""
    door, caller = door_of(request)
    session = await door.store.session(session_id, caller)
    lines = ClientSessionExport(door.gateway.redis, door.store.weights).lines(session)
    return StreamingResponse(lines, media_type="application/jsonl")


@router.delete("/sessions/{session_id}")
async def delete_client_session(session_id: str, request: Request) -> DeletedClientSession:
    """End the models of a client session, and delete it with its models, weights, sampling sessions and
    samples. If that is interrupted, a gateway goes on with it. The SDK has no method for it."""
    door, caller = door_of(request)
    session = await door.store.session(session_id, caller)
    removed = await door.removal.delete_session(session.session_id)
    logger.info("client session %s is deleted by key %s: %s", session_id, caller.key or "-", removed)
    return DeletedClientSession(session_id=session_id, deleted=msgspec.to_builtins(removed))
