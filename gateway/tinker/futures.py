"""Polls of promises. A poll is held until there is a result, or until it is told to ask again.

Writes the result of a command as the SDK reads it: JSON, or protobuf for forward_backward.
"""

from array import array
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.edge.request import JSON
from gateway.errors import invalid
from gateway.rest.bodies import PROTOBUF
from gateway.tinker import messages_pb2 as wire
from gateway.tinker.door import TinkerDoor, door_of
from gateway.tinker.paths import PromiseId, WeightsPath, promise_id, sampler_of, session_of
from gateway.tinker.promises import MADE
from gateway.tinker.sdk_bodies import CancelBody, FutureBody
from rollout_queue.contract.packed_tokens import pack
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import JsonRoute
from rollout_queue.redis.command_log import Gone, Waiting
from rollout_queue.trainer_commands import (
    Answer,
    CommandFailed,
    Created,
    Exported,
    LoadWeights,
    Passed,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    Stepped,
    request_id,
)


def body_of(model_id: str, answer: Answer) -> tuple[bytes, str]:
    """The body and its media type."""
    if isinstance(answer.result, Passed):
        return _passed(answer.result), PROTOBUF
    return msgspec.json.encode(_json(model_id, answer)), JSON


def _json(model_id: str, answer: Answer) -> dict[str, Any]:
    match answer.result, answer.command:
        case CommandFailed(error, category), _:
            return {"error": error, "category": category}
        case Created(), _:
            return {"model_id": model_id, "type": "create_model"}
        case Stepped(metrics), _:
            return {"metrics": metrics, "type": "optim_step"}
        case _, SaveWeights(name=name):
            return {"path": str(WeightsPath(model_id, "weights", name)), "type": "save_weights"}
        case _, SaveForSampler(name=name):
            return _sampleable(model_id, name) | {"type": "save_weights_for_sampler"}
        case Exported(size_bytes=size), SaveExternal(name=name):
            path = str(WeightsPath(model_id, "external_weights", name))
            return {"path": path, "size_bytes": size, "type": "save_weights_external"}
        case _, LoadWeights(model_id=source, name=name):
            path = str(WeightsPath(source, "weights", name))
            return {"path": path, "model_id": model_id, "type": "load_weights"}
    raise ValueError(f"a result without its command: {answer}")


def _sampleable(model_id: str, name: str) -> dict[str, Any]:
    if not name.startswith("~"):
        return {"path": str(WeightsPath(model_id, "sampler_weights", name))}
    number = int(name.rpartition("~")[2])
    return {"sampling_session_id": sampler_of(session_of(model_id), number)}


def _passed(passed: Passed) -> bytes:
    offsets, end = array("q", [0]), 0
    packed = [pack(each) for each in passed.logprobs]
    for each in packed:
        end += len(each)
        offsets.append(end)
    logprobs = wire.BatchedTensor(
        data=b"".join(packed),
        offsets=offsets.tobytes(),
        dtype=wire.DTYPE_FLOAT32,
        trailing_shape=[passed.k] if passed.k > 1 else [],
    )
    record = wire.ArrayRecord(
        type_tag="ArrayRecord", fields={"logprobs": logprobs}, num_datums=len(passed.logprobs)
    )
    output = wire.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=passed.metrics
    )
    encoded: bytes = output.SerializeToString()
    return encoded


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
        raise invalid("request_id", "only samples can be cancelled")
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
    pending = _active(promise)
    if await door.log.is_full():
        pending["queue_state"] = "paused_capacity"
        pending["queue_state_reason"] = "the command log is full until the trainer has written a checkpoint"
    return pending


def _active(promise: PromiseId) -> dict[str, str]:
    return {"type": "try_again", "request_id": str(promise), "queue_state": "active"}
