"""Offers the files of exports at URLs that need no key for a while.

client ─ key ─▶ external_weights_urls ─▶ URLs with an end and a signature ─▶ GET, without a key ─▶ bytes
"""

import asyncio
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import InvalidRequest, LimitReached, NotPermitted, ObjectNotFound
from gateway.parts import parts_of
from gateway.rest.tinker_api.door import door_of, now
from gateway.rest.tinker_api.paths import PATH, WeightsPath, weights_path
from gateway.rest.tinker_api.wire.bodies import Number
from rollout_queue import clock
from rollout_queue.commands.result import Exported, Kept
from rollout_queue.http.files import LargeFile

router = APIRouter(tags=["tinker"])

URLS_LAST_S = 3600
"""The SDK's command line asks anew 5 minutes before the end."""
Seconds = Annotated[int, Query(ge=0, lt=2**40)]
RETRY_S = 5
"""When a client may try again that found all downloads taken."""
BYTES = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


class Download(LargeFile):
    """A file that needs one of the slots, and ends at last with its URL: a client may read slowly."""

    def __init__(self, path: Path, slots: asyncio.Semaphore) -> None:
        super().__init__(path, media_type="application/octet-stream")
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._slots.locked():
            message = "this gateway sends as many files of exports as it may at once; try again"
            raise LimitReached(message, code="downloads_limit", retry_s=RETRY_S)
        async with self._slots, clock.timeout(URLS_LAST_S):
            await super().__call__(scope, receive, send)


@router.get("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(training_run_id: str, kind: str, name: str, request: Request) -> JSONResponse:
    """A URL for each file of an export. Anyone who has it can read the file until `expires`."""
    door, caller = door_of(request)
    path = _path(training_run_id, kind, name)
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
    path = _path(model_id, "external_weights", name)
    found = await door.store.weights.named(path)
    if found.kept.number != number:
        raise ObjectNotFound(f"the files of {path} are deleted, and others have its name")
    files = await asyncio.to_thread(_files, path, found.kept)
    if file not in files:
        raise ObjectNotFound(f"{path} has no file {file!r}")
    return Download(files[file], door.downloads)


def _path(model_id: str, kind: str, name: str) -> WeightsPath:
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
