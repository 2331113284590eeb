"""Polls of promises. A poll is held until there is a result, or until it is told to ask again."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.edge.request import JSON
from gateway.errors import InvalidRequest
from gateway.rest.json_bodies import PROTOBUF
from gateway.rest.tinker_api.door import TinkerDoor, door_of
from gateway.rest.tinker_api.paths import PromiseId, promise_id
from gateway.rest.tinker_api.sample_promises import MADE
from gateway.rest.tinker_api.wire.answers import body_of
from gateway.rest.tinker_api.wire.bodies import CancelBody, FutureBody
from rollout_queue.commands.command import request_id
from rollout_queue.commands.result import Answer
from rollout_queue.http.bodies.json_routes import JsonRoute
from rollout_queue.http.errors import ApiError
from rollout_queue.redis.commands.submission import Gone, Waiting

router = APIRouter(tags=["tinker"], route_class=JsonRoute)

LARGE_BYTES = 2**20
"""The size of a larger result is told first, if the client asks for that."""


@router.post("/retrieve_future")
async def retrieve_future(body: FutureBody, request: Request) -> Response:
    """The result of a promise, 408's equal `try_again` while it is worked on, or 410 once it is gone."""
    door, caller = door_of(request)
    promise = promise_id(body.request_id)
    if promise.kind == "s":
        await door.store.target(promise.of, caller)
        return await _sample(door, promise, body)
    await door.store.model(promise.of, caller)
    found = await result_of(door, promise)
    if isinstance(found, Gone):
        raise ApiError(410, f"the result of {promise} is not kept any more, or never was promised")
    if found is None:
        return JSONResponse(await _try_again(door, promise))
    return _told(*body_of(promise.of, found), body)


@router.post("/cancel_future")
async def cancel_future(body: CancelBody, request: Request) -> JSONResponse:
    """Make a sample no further; its promise then fails. A sample that is made stays."""
    door, caller = door_of(request)
    promise = promise_id(body.request_id)
    if promise.kind != "s":
        raise InvalidRequest("request_id: only samples can be cancelled", param="request_id")
    await door.store.target(promise.of, caller)
    await door.promises.cancel(promise)
    return JSONResponse({})


async def _sample(door: TinkerDoor, promise: PromiseId, body: FutureBody) -> Response:
    async def read() -> bytes | Gone | None:
        found = await door.promises.result(promise)
        return Gone() if found is None else found or None

    found = await door.announcements.wait(str(promise), read, door.gateway.settings.tinker.poll_s)
    if isinstance(found, Gone):
        raise ApiError(410, f"the sample {promise} is not made any more, or was never asked for")
    if found is None:
        return JSONResponse(_active(promise))
    return _told(bytes(found[1:]), PROTOBUF if found[:1] == MADE else JSON, body)


def _told(data: bytes, media_type: str, body: FutureBody) -> Response:
    if body.allow_metadata_only and len(data) > LARGE_BYTES:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": len(data)})
    return Response(data, media_type=media_type)


async def result_of(door: TinkerDoor, promise: PromiseId) -> Answer | Gone | None:
    """The result of a command; None if there is still none after a while."""

    async def read() -> Answer | Gone | None:
        found = await door.log.result(promise.of, promise.number)
        return None if isinstance(found, Waiting) else found

    request = request_id(promise.of, promise.number)
    return await door.announcements.wait(request, read, door.gateway.settings.tinker.poll_s)


async def _try_again(door: TinkerDoor, promise: PromiseId) -> dict[str, str]:
    told = _active(promise)
    if await door.log.is_full():
        told["queue_state"] = "paused_capacity"
        told["queue_state_reason"] = "the command log is full until the trainer has written a checkpoint"
    return told


def _active(promise: PromiseId) -> dict[str, str]:
    return {"type": "try_again", "request_id": str(promise), "queue_state": "active"}
