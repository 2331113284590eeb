"""Polls of promises. A poll is held until there is a result, or until it is told to ask again."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.rest.tinker_api.answers import body_of
from gateway.rest.tinker_api.bodies import FutureBody
from gateway.rest.tinker_api.door import TinkerDoor, door_of
from gateway.rest.tinker_api.paths import PromiseId, promise_id
from rollout_queue.commands.command import request_id
from rollout_queue.commands.result import Answer
from rollout_queue.http.errors import ApiError
from rollout_queue.redis.commands.submission import Gone, Waiting

router = APIRouter(tags=["tinker"])

LARGE_BYTES = 2**20
"""The size of a larger result is told first, if the client asks for that."""


@router.post("/retrieve_future")
async def retrieve_future(body: FutureBody, request: Request) -> Response:
    """The result of a promise, 408's equal `try_again` while it is worked on, or 410 once it is gone."""
    door, caller = door_of(request)
    promise = promise_id(body.request_id)
    await door.store.model(promise.of, caller)
    found = await _result(door, promise)
    if isinstance(found, Gone):
        raise ApiError(410, f"the result of {promise} is not kept any more, or never was promised")
    if found is None:
        return JSONResponse(await _try_again(door, promise))
    data, media_type = body_of(promise.of, found)
    if body.allow_metadata_only and len(data) > LARGE_BYTES:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": len(data)})
    return Response(data, media_type=media_type)


async def _result(door: TinkerDoor, promise: PromiseId) -> Answer | Gone | None:
    """None if there is still none after a while."""

    async def read() -> Answer | Gone | None:
        found = await door.log.result(promise.of, promise.number)
        return None if isinstance(found, Waiting) else found

    request = request_id(promise.of, promise.number)
    return await door.announcements.wait(request, read, door.gateway.settings.tinker.poll_s)


async def _try_again(door: TinkerDoor, promise: PromiseId) -> dict[str, str]:
    told = {"type": "try_again", "request_id": str(promise), "queue_state": "active"}
    if await door.log.is_full():
        told["queue_state"] = "paused_capacity"
        told["queue_state_reason"] = "the command log is full until the trainer has written a checkpoint"
    return told
