"""Copies a checkpoint: a new model loads it, saves it under the same name, and ends.

copy_weights ─▶ LoadWeights (0), SaveWeights (1) of the new model ─▶ trainer ─▶ the path of the copy
"""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.callers.identity import Caller
from gateway.errors import InvalidRequest, ObjectNotFound
from gateway.rest.tinker_api.door import TinkerDoor, door_of, now
from gateway.rest.tinker_api.futures import result_of
from gateway.rest.tinker_api.models import check_trainer
from gateway.rest.tinker_api.paths import WeightsPath, model_of, weights_path
from gateway.rest.tinker_api.records import ClientModel, ClientSession, KeptTerms
from gateway.rest.tinker_api.wire.bodies import CopyWeightsBody
from rollout_queue.commands.command import Command, LoadWeights, SaveWeights
from rollout_queue.commands.result import Answer, CommandFailed
from rollout_queue.http.bodies.json_routes import JsonRoute
from rollout_queue.http.errors import ApiError
from rollout_queue.redis.commands.submission import Gone

router = APIRouter(tags=["tinker"], route_class=JsonRoute)

TOKEN = "x-tinker-weights-access-token"  # noqa: S105 - the name of a header


@router.post("/copy_weights")
async def copy_weights(body: CopyWeightsBody, request: Request) -> JSONResponse:
    """Copy a checkpoint of the caller's key, or a public one, into a new model of a session, which takes no
    commands. 408 asks for the same request again."""
    door, caller = door_of(request)
    if body.destination_project_id is not None:
        field = "destination_project_id"
        raise InvalidRequest(f"{field}: there are no projects here", param=field)
    if body.weights_access_token is not None or TOKEN in request.headers:
        raise InvalidRequest("weights_access_token: not served here", param="weights_access_token")
    if body.session_id is None or body.model_seq_id is None:
        raise InvalidRequest("session_id and model_seq_id must be given", param="session_id")
    source = weights_path(body.source_path, "source_path")
    if source.kind != "weights":
        raise InvalidRequest(f"source_path: {source} is no checkpoint to copy", param="source_path")
    session = await door.store.session(body.session_id, caller)
    path = WeightsPath(model_of(session.session_id, body.model_seq_id), "weights", source.name)
    if not await _is_made(door, caller, source, path):
        await _make(door, caller, session, source, path, body.ttl_seconds)
    await door.log.end(path.model_id, "it holds a copy")
    await door.store.weights.named(path)  # its time may be over, or it is deleted
    return JSONResponse({"tinker_path": str(path), "type": "copy_weights"})


async def _is_made(door: TinkerDoor, caller: Caller, source: WeightsPath, path: WeightsPath) -> bool:
    """Whether an earlier request with the same content has made the copy."""
    found = await door.store.weights.find(path)
    if found is None or found.expired:
        return False
    return (await door.store.model(path.model_id, caller)).user_metadata == _told_of(source)


def _told_of(source: WeightsPath) -> dict[str, str]:
    return {"copied_from": str(source)}


async def _make(
    door: TinkerDoor,
    caller: Caller,
    session: ClientSession,
    source: WeightsPath,
    path: WeightsPath,
    ttl_s: int | None,
) -> None:
    await check_trainer(door)
    model, _ = await door.store.kept(source, caller)
    copy = ClientModel(
        model_id=path.model_id,
        session_id=session.session_id,
        owner=caller.owner,
        created_at=now(),
        base_model=model.base_model,
        lora=model.lora,
        user_metadata=_told_of(source),
        user=session.user,
    )
    await door.store.add_model(copy)
    await door.store.weights.note_terms(path, 1, KeptTerms(ttl_s=ttl_s))
    commands: list[Command] = [
        LoadWeights(source.model_id, source.name, optimizer=True),
        SaveWeights(path.name),
    ]
    first, last = [await door.submit(copy.model_id, number, each) for number, each in enumerate(commands)]
    found = await result_of(door, last)
    if found is None:
        raise ApiError(408, f"{source} is being copied: ask again")
    if isinstance(found, Gone):
        raise ObjectNotFound(f"the copy {path} is not there any more")
    if isinstance(found.result, CommandFailed):
        await door.log.end(copy.model_id, "it was to hold a copy, which failed")
        loaded = await door.log.result(first.of, first.number)  # the second one fails if the first one has
        failed = loaded.result if isinstance(loaded, Answer) else None
        error = failed.error if isinstance(failed, CommandFailed) else found.result.error
        raise InvalidRequest(f"{source} is not copied: {error}", param="source_path")
