"""What a client asks first: the configuration, its session, and which models there are; and the end of it.

Writes what is kept of a client session as lines of JSON, some records at a time.

session ─ model ─ its commands ─ its weights ─ next model … ─ samplers ─ samples, by the ids of their sessions
"""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from redis.asyncio import Redis

from gateway.callers.identity import user_named
from gateway.edge.reply import one_line
from gateway.errors import InvalidRequest
from gateway.rest.shapes import DeletedClientSession
from gateway.tinker.door import door_of, now
from gateway.tinker.paths import ClientModel, ClientSession
from gateway.tinker.sdk_bodies import (
    ClientConfigBody,
    ClientFinishBody,
    TinkerHeartbeatBody,
    TinkerSessionBody,
)
from gateway.tinker.weights import KeptWeights, KeptWeightsStore
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.ids import new_id
from rollout_queue.http.errors import ApiError, storage_unavailable
from rollout_queue.http.json_routes import JsonRoute
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.command_log import MOST_EARLY
from rollout_queue.redis.command_scripts import REMEMBERED

logger = logging.getLogger(__name__)

AT_ONCE = 500
"""Records that are read by one round trip."""

Line = Mapping[str, Any]


class ClientSessionExport:
    """Reads one client session. The caller has asked whether it is the client's."""

    def __init__(self, redis: Redis, weights: KeptWeightsStore) -> None:
        self._redis, self._weights = redis, weights

    async def lines(self, session: ClientSession) -> AsyncIterator[bytes]:
        """The lines. After an error, the last one is the error body of the REST routes."""
        try:
            async for some in self._records(session):
                yield one_line(b"".join(msgspec.json.encode(each) + b"\n" for each in some))
        except StorageUnavailable as error:
            logger.warning("the export of client session %s ends early: %s", session.session_id, error)
            yield msgspec.json.encode(storage_unavailable(error).body) + b"\n"

    async def _records(self, session: ClientSession) -> AsyncIterator[Iterable[Line]]:
        finished: Any = await stored(
            self._redis.hget(key_names.client_session(session.session_id), "finished")
        )
        how = None if finished is None else msgspec.json.decode(finished)
        yield [{"type": "session", **msgspec.to_builtins(session), "finished": how}]
        async for names in self._members(key_names.made_in(session.session_id)):
            models = sorted(each for each in names if ":train:" in each)
            for model_id in models:
                async for some in self._of_model(model_id):
                    yield some
            targets = [key_names.sampling_target(each) for each in names if ":train:" not in each]
            if targets:
                found: Any = await stored(self._redis.mget(targets))  # bounded: AT_ONCE
                yield [{"type": "sampler", **msgspec.json.decode(each)} for each in found if each]
        async for names in self._members(key_names.user_sessions(session.session_id)):
            yield [{"type": "sample", "session_id": each} for each in names]

    async def _of_model(self, model_id: str) -> AsyncIterator[Iterable[Line]]:
        fields = await stored(self._redis.hmget(key_names.model(model_id), "spec", "ended", "next", "done"))
        spec, ended, following, done = fields
        if spec is None:
            return
        model = msgspec.json.decode(spec, type=ClientModel)
        yield [{"type": "model", **msgspec.to_builtins(model), "ended": ended and ended.decode()}]
        reached, following = int(done if done is not None else -1), int(following)
        for first in range(max(0, following - REMEMBERED), following + MOST_EARLY + 1, AT_ONCE):
            numbers = range(first, first + AT_ONCE)
            found: Any = await stored(
                self._redis.hmget(
                    key_names.model(model_id), [f"k:{number}" for number in numbers]
                )  # bounded: AT_ONCE
            )
            known = ((number, each.decode()) for number, each in zip(numbers, found, strict=True) if each)
            yield [_command(model_id, number, each, reached, following) for number, each in known]
        yield [_weights(each) for each in await self._weights.all_kept(model_id)]

    async def _members(self, name: str) -> AsyncIterator[list[str]]:
        """Every member of a set, a few at a time; one may come twice if the set changes."""
        cursor = None
        while cursor != 0:
            cursor, found = await stored(self._redis.sscan(name, cursor or 0, count=AT_ONCE))
            yield [each.decode() for each in found]


def _command(model_id: str, number: int, note: str, reached: int, following: int) -> Line:
    kind, at_ms = note.split()
    state = "done" if number <= reached else "waits" if number < following else "waits for earlier ones"
    at = int(at_ms) / 1000
    return {
        "type": "command",
        "model_id": model_id,
        "seq_id": number,
        "kind": kind,
        "created_at": at,
        "state": state,
    }


def _weights(weights: KeptWeights) -> Line:
    return {
        "type": "weights",
        "path": str(weights.path),
        "created_at": weights.kept.created_at,
        "size_bytes": weights.kept.made.size_bytes,
        "expires_at": weights.expires_at,
        "public": weights.terms.public,
        "user_metadata": weights.terms.user_metadata,
    }


router = APIRouter(tags=["tinker"], route_class=JsonRoute)

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
