"""OpenAI's routes for files, of the purpose `fine-tune`."""

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse

from fine_tuning.errors import BadInput
from fine_tuning.files.store import FileStore, StoredFile
from fine_tuning.rest.multipart import form_of
from fine_tuning.rest.pages import page_of

PURPOSE = "fine-tune"
UPLOADS = "/v1/files"
FIELDS = ("file", "purpose")


def file_routes(store: FileStore) -> APIRouter:
    router = APIRouter(prefix=UPLOADS, tags=["files"])

    @router.post("")
    async def create(request: Request) -> JSONResponse:
        """Upload a file."""
        form = form_of(request.headers.get("content-type", ""), await request.body())
        if foreign := [name for name in form if name not in FIELDS]:
            raise BadInput(f"{foreign[0][:100]!r} is not served", foreign[0][:100])
        purpose = form["purpose"].content.decode(errors="replace") if "purpose" in form else ""
        if purpose != PURPOSE:
            raise BadInput(f"purpose must be {PURPOSE!r}", "purpose")
        if "file" not in form or form["file"].filename is None:
            raise BadInput("there is no file", "file")
        file = form["file"]
        return JSONResponse(_shown(store.add(file.filename or "", purpose, file.content)))

    @router.get("")
    async def list_files(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> JSONResponse:
        """The files, the newest first."""
        found = [each for each in store.newest_first if purpose in (None, each.purpose)]
        found = found if order == "desc" else found[::-1]
        return JSONResponse(page_of(found, _shown, lambda each: each.id, after, limit))

    @router.get("/{file_id}")
    async def retrieve(file_id: str) -> JSONResponse:
        return JSONResponse(_shown(store.get(file_id)))

    @router.get("/{file_id}/content")
    async def content(file_id: str) -> FileResponse:
        return FileResponse(store.path(store.get(file_id)), media_type="application/octet-stream")

    @router.delete("/{file_id}")
    async def delete(file_id: str) -> JSONResponse:
        """Delete a file. Jobs that were made with it keep their copies."""
        store.delete(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return router


def _shown(file: StoredFile) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(file)
    return found
