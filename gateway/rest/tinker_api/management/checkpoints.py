"""Deletes, publishes and times the named weights of a client key."""

import logging

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.callers.identity import Caller
from gateway.errors import ObjectNotFound
from gateway.rest.tinker_api.door import TinkerDoor, door_of
from gateway.rest.tinker_api.paths import PATH, WeightsPath, weights_path
from gateway.rest.tinker_api.records import KeptTerms
from gateway.rest.tinker_api.weights import KeptWeights
from gateway.rest.tinker_api.wire.bodies import TtlBody
from rollout_queue import clock
from rollout_queue.http.bodies.json_routes import JsonRoute

logger = logging.getLogger(__name__)
router = APIRouter(
    tags=["tinker"],
    prefix="/training_runs/{training_run_id}/checkpoints/{kind}/{name}",
    route_class=JsonRoute,
)


@router.delete("", status_code=204)
async def delete_checkpoint(training_run_id: str, kind: str, name: str, request: Request) -> Response:
    """Delete weights. Nobody can load or sample them any more; the trainer removes their files."""
    door, caller = door_of(request)
    path = await _path(door, caller, training_run_id, kind, name)
    if not await door.store.weights.delete(await door.store.weights.named(path)):
        raise _absent(path)
    logger.info("weights %s are deleted by key %s", path, caller.key or "-")
    return Response(status_code=204)


@router.put("/ttl", status_code=204)
async def set_checkpoint_ttl(
    training_run_id: str, kind: str, name: str, body: TtlBody, request: Request
) -> Response:
    """Have weights deleted after so many seconds from now; null: never."""
    door, caller = door_of(request)
    path = await _path(door, caller, training_run_id, kind, name)

    def timed(weights: KeptWeights) -> KeptTerms:
        age_s = clock.now() - weights.kept.created_at
        ttl_s = None if body.ttl_seconds is None else age_s + body.ttl_seconds
        return msgspec.structs.replace(weights.terms, ttl_s=ttl_s)

    await door.store.weights.change(path, timed)
    return Response(status_code=204)


@router.post("/publish", status_code=204)
async def publish_checkpoint(training_run_id: str, kind: str, name: str, request: Request) -> Response:
    """Let all keys read, load and sample weights."""
    await _publish(request, training_run_id, kind, name, public=True)
    return Response(status_code=204)


@router.delete("/publish", status_code=204)
async def unpublish_checkpoint(training_run_id: str, kind: str, name: str, request: Request) -> Response:
    """Let only the owner's key use weights again."""
    await _publish(request, training_run_id, kind, name, public=False)
    return Response(status_code=204)


async def _publish(request: Request, model_id: str, kind: str, name: str, *, public: bool) -> None:
    door, caller = door_of(request)
    path = await _path(door, caller, model_id, kind, name)
    await door.store.weights.change(
        path, lambda weights: msgspec.structs.replace(weights.terms, public=public)
    )
    logger.info(
        "weights %s are %s by key %s", path, "published" if public else "unpublished", caller.key or "-"
    )


async def _path(door: TinkerDoor, caller: Caller, model_id: str, kind: str, name: str) -> WeightsPath:
    """The path of weights of a model of the caller's key. Raises ObjectNotFound."""
    text = f"tinker://{(await door.store.model(model_id, caller)).model_id}/{kind}/{name}"
    if PATH.fullmatch(text) is None:
        raise ObjectNotFound(f"there are no weights {text}")
    return weights_path(text)


def _absent(path: WeightsPath) -> ObjectNotFound:
    return ObjectNotFound(f"there are no weights {path}")
