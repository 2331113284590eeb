"""Deletes, publishes and times the named weights of a client key.

Copies a checkpoint: a new model loads it, saves it under the same name, and ends.

copy_weights ─▶ LoadWeights (0), SaveWeights (1) of the new model ─▶ trainer ─▶ the path of the copy

Offers the files of exports at URLs that need no key for a while.

client ─ key ─▶ external_weights_urls ─▶ URLs with an end and a signature ─▶ GET, without a key ─▶ bytes
"""

import asyncio
import hmac
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.callers.identity import Caller
from gateway.errors import InvalidRequest, LimitReached, NotPermitted, ObjectNotFound, invalid
from gateway.parts import parts_of
from gateway.prometheus import Metrics
from gateway.tinker.door import TinkerDoor, door_of, now
from gateway.tinker.futures import result_of
from gateway.tinker.model_commands import check_trainer
from gateway.tinker.paths import (
    PATH,
    ClientModel,
    ClientSession,
    KeptTerms,
    WeightsPath,
    model_of,
    weights_path,
)
from gateway.tinker.sdk_bodies import CopyWeightsBody, Number, TtlBody
from gateway.tinker.weights import KeptWeights
from rollout_queue import clock
from rollout_queue.http.errors import ApiError
from rollout_queue.http.files import LargeFile
from rollout_queue.http.json_routes import JsonRoute
from rollout_queue.redis.command_log import Gone
from rollout_queue.trainer_commands import (
    Answer,
    Command,
    CommandFailed,
    Exported,
    Kept,
    LoadWeights,
    SaveWeights,
)

logger = logging.getLogger(__name__)
router = APIRouter(tags=["tinker"], route_class=JsonRoute)


@router.delete("/training_runs/{training_run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(training_run_id: str, kind: str, name: str, request: Request) -> Response:
    """Delete weights. Nobody can load or sample them any more; the trainer removes their files."""
    door, caller = door_of(request)
    path = await _path(door, caller, training_run_id, kind, name)
    if not await door.store.weights.delete(await door.store.weights.named(path)):
        raise _absent(path)
    logger.info("weights %s are deleted by key %s", path, caller.key or "-")
    return Response(status_code=204)


@router.put("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
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


@router.post("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/publish", status_code=204)
async def publish_checkpoint(training_run_id: str, kind: str, name: str, request: Request) -> Response:
    """Let all keys read, load and sample weights."""
    await _publish(request, training_run_id, kind, name, public=True)
    return Response(status_code=204)


@router.delete("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/publish", status_code=204)
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


TOKEN = "x-tinker-weights-access-token"  # noqa: S105 - the name of a header


@router.post("/copy_weights")
async def copy_weights(body: CopyWeightsBody, request: Request) -> JSONResponse:
    """Copy a checkpoint of the caller's key, or a public one, into a new model of a session, which takes no
    commands. 408 asks for the same request again."""
    door, caller = door_of(request)
    if body.destination_project_id is not None:
        field = "destination_project_id"
        raise invalid(field, "there are no projects here")
    if body.weights_access_token is not None or TOKEN in request.headers:
        raise invalid("weights_access_token", "not served here")
    if body.session_id is None or body.model_seq_id is None:
        raise InvalidRequest("session_id and model_seq_id must be given", param="session_id")
    source = weights_path(body.source_path, "source_path")
    if source.kind != "weights":
        raise invalid("source_path", f"{source} is no checkpoint to copy")
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


URLS_LAST_S = 3600
"""The SDK's command line asks anew 5 minutes before the end."""
Seconds = Annotated[int, Query(ge=0, lt=2**40)]
RETRY_S = 5
"""When a client may try again that found all downloads taken."""
BYTES = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


class Download(LargeFile):
    """A file that needs one of the slots, and ends at last with its URL: a client may read slowly."""

    def __init__(self, path: Path, slots: asyncio.Semaphore, metrics: Metrics) -> None:
        super().__init__(path, media_type="application/octet-stream")
        self._slots, self._metrics = slots, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._slots.locked():
            message = "this gateway sends as many files of exports as it may at once; try again"
            full = LimitReached(message, code="downloads_limit", retry_s=RETRY_S)
            raise self._metrics.refused(full)
        async with self._slots, clock.timeout(URLS_LAST_S):
            await super().__call__(scope, receive, send)


@router.get("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(training_run_id: str, kind: str, name: str, request: Request) -> JSONResponse:
    """A URL for each file of an export. Anyone who has it can read the file until `expires`."""
    door, caller = door_of(request)
    path = _export_path(training_run_id, kind, name)
    _, kept = await door.store.kept(path, caller)
    files = await asyncio.to_thread(_files, path, kept)
    base = door.gateway.settings.public_url or str(request.base_url)
    expires_at = int(now()) + URLS_LAST_S
    urls = {}
    for file in sorted(files):
        place = f"/api/v1/external_weights/{path.model_id}/{path.name}/{kept.number}/{file}"
        signature = door.gateway.identities.file_signature(place, expires_at)
        urls[file] = f"{base.rstrip('/')}{quote(place)}?expires={expires_at}&signature={signature}"
    expires = datetime.fromtimestamp(expires_at, UTC).isoformat()
    return JSONResponse({"urls": urls, "expires": expires})


@router.get(
    "/external_weights/{model_id}/{name}/{number}/{file}",
    response_class=LargeFile,
    responses={200: BYTES, 206: BYTES},
)
async def external_weights_file(
    model_id: str,
    name: str,
    number: Number,
    file: str,
    request: Request,
    expires: Seconds = 0,
    signature: str = "",
) -> Download:
    """One file of an export, or the range of it that was asked for. The URL is signed, and needs no key."""
    identities, door = parts_of(request).identities, request.app.state.tinker
    place = f"/api/v1/external_weights/{model_id}/{name}/{number}/{file}"
    genuine = identities.file_signature(place, expires)
    if not hmac.compare_digest(signature.encode(errors="replace"), genuine.encode()):
        raise NotPermitted("the URL is not signed: external_weights_urls makes such URLs")
    if expires < now():
        raise NotPermitted("the URL has expired: external_weights_urls makes another one")
    path = _export_path(model_id, "external_weights", name)
    found = await door.store.weights.named(path)
    if found.kept.number != number:
        raise ObjectNotFound(f"the files of {path} are deleted, and others have its name")
    files = await asyncio.to_thread(_files, path, found.kept)
    if file not in files:
        raise ObjectNotFound(f"{path} has no file {file!r}")
    return Download(files[file], door.downloads, door.gateway.metrics)


def _export_path(model_id: str, kind: str, name: str) -> WeightsPath:
    """Raises ObjectNotFound for what can be no name, InvalidRequest for weights that are no export."""
    text = f"tinker://{model_id}/{kind}/{name}"
    if PATH.fullmatch(text) is None:
        raise ObjectNotFound(f"there are no weights {text[:500]}")
    path = weights_path(text)
    if path.kind != "external_weights":
        raise InvalidRequest(f"{path} is no export: save_weights_external makes one")
    return path


def _files(path: WeightsPath, kept: Kept) -> Mapping[str, Path]:
    """The files of an export by their names, which no caller has made. Raises ObjectNotFound."""
    made = kept.made
    try:
        found = list(Path(made.location).iterdir()) if isinstance(made, Exported) else []
        files = {each.name: each for each in found if each.is_file() and not each.is_symlink()}
    except OSError as error:
        message = f"this gateway cannot read the files of {path}: it needs the trainer's policies_dir"
        raise ObjectNotFound(message, code="files_unreachable") from error
    return files
