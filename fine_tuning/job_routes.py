"""OpenAI's routes for files of the purpose `fine-tune` and for fine-tuning jobs.

The body of an upload (multipart/form-data) is in memory and bounded already when it is read. Lists come in
pages: `after` is the id of the last object of the page before.
"""

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse

from fine_tuning.errors import BadInput, BadRow
from fine_tuning.job_queue import JobQueue
from fine_tuning.jobs import FineTuningJob, JobCheckpoint, JobEvent, JobRequest, JobStore
from fine_tuning.served_versions import GatewaySilent, PolicyWatch
from fine_tuning.settings import FineTuningLimits
from fine_tuning.training_files import FileStore, RowFile, StoredFile
from reward_service.grader_runner import GraderRunner
from reward_service.graders.grade import UnusableSource
from reward_service.graders.grader_objects import brings_python
from rollout_queue import clock
from rollout_queue.contract.ids import new_id
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import JsonRoute

T = TypeVar("T")


def page_of(
    found: Sequence[T],
    show: Callable[[T], dict[str, Any]],
    ids: Callable[[T], str],
    after: str | None,
    limit: int,
) -> dict[str, Any]:
    """Raises BadInput for an `after` that is not in the list."""
    start = 0
    if after is not None:
        place = next((place for place, each in enumerate(found) if ids(each) == after), None)
        if place is None:
            raise BadInput(f"the list has no {after[:100]!r}", "after")
        start = place + 1
    data = [show(each) for each in found[start : start + limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(found),
    }


MAX_PARTS = 32
MAX_HEADER_BYTES = 8192


@dataclass(frozen=True)
class FormPart:
    """One field of a form; `filename` is None if it is no file."""

    name: str
    filename: str | None
    content: bytes


def form_of(content_type: str, body: bytes) -> dict[str, FormPart]:
    """The fields of a form by their names. Raises BadInput."""
    kind = Message()
    kind["content-type"] = content_type
    boundary = kind.get_boundary()
    if kind.get_content_type() != "multipart/form-data" or not boundary:
        raise BadInput("the body must be multipart/form-data, as OpenAI's clients send files")
    marker = b"\r\n--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(marker, MAX_PARTS + 1)[1:]
    if not pieces or not pieces[-1].startswith(b"--"):
        raise BadInput("the body has no end, or more parts than an upload needs")
    parts = [_part(piece) for piece in pieces[:-1]]
    return {part.name: part for part in parts}


def _part(piece: bytes) -> FormPart:
    head, blank, content = piece.partition(b"\r\n\r\n")
    if not blank or len(head) > MAX_HEADER_BYTES:
        raise BadInput("a part of the body has no headers, or too many")
    headers = HeaderParser().parsestr(head.lstrip(b"\r\n").decode(errors="replace") + "\r\n\r\n")
    try:
        name = headers.get_param("name", header="content-disposition")
        filename = headers.get_filename()
    except (ValueError, LookupError, TypeError) as error:
        raise BadInput(f"a part of the body has headers that cannot be read: {error}") from None
    if not isinstance(name, str):
        raise BadInput("a part of the body has no name")
    return FormPart(name, filename and filename.encode(errors="replace").decode(), content)


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


def _shown(value: StoredFile | JobEvent | JobCheckpoint) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


Limit = Annotated[int, Query(ge=1, le=1000)]


class JobRoutes:
    """Makes jobs, and tells of them."""

    def __init__(
        self,
        jobs: JobStore,
        files: FileStore,
        queue: JobQueue,
        policy: PolicyWatch,
        limits: FineTuningLimits,
        runner: GraderRunner,
        *,
        python: bool,
    ) -> None:
        """`python`: jobs may bring Python graders. Without keys they may not: every program of the machine is
        an admin. `runner` loads them."""
        self._jobs, self._files, self._queue, self._policy = jobs, files, queue, policy
        self._runner = runner
        self._limits, self._python = limits, python
        self._making = asyncio.Lock()
        """One file is checked at a time."""

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["jobs"], route_class=JsonRoute)
        self._add_changes(router)
        self._add_readings(router)
        return router

    def _add_changes(self, router: APIRouter) -> None:
        @router.post("")
        async def create(body: JobRequest) -> JSONResponse:
            """Make a job; it trains when no older one does."""
            async with self._making:
                return JSONResponse((await self._make(body)).shown)

        @router.post("/{job_id}/cancel")
        async def cancel(job_id: str) -> JSONResponse:
            return JSONResponse(self._queue.cancel(job_id).shown)

        @router.post("/{job_id}/pause")
        async def pause(job_id: str) -> JSONResponse:
            return JSONResponse(self._queue.pause(job_id).shown)

        @router.post("/{job_id}/resume")
        async def resume(job_id: str) -> JSONResponse:
            return JSONResponse(self._queue.resume(job_id).shown)

    def _add_readings(self, router: APIRouter) -> None:
        @router.get("")
        async def list_jobs(request: Request, after: str | None = None, limit: Limit = 20) -> JSONResponse:
            """The jobs, the newest first; `metadata[k]=v` selects some."""
            found = [job for job in self._jobs.newest_first if _selected(job, request)]
            return JSONResponse(page_of(found, lambda job: job.shown, lambda job: job.id, after, limit))

        @router.get("/{job_id}")
        async def retrieve(job_id: str) -> JSONResponse:
            return JSONResponse(self._jobs.get(job_id).shown)

        @router.get("/{job_id}/events")
        async def events(job_id: str, after: str | None = None, limit: Limit = 20) -> JSONResponse:
            """What happened, the newest first."""
            found = self._jobs.events(self._jobs.get(job_id))
            return JSONResponse(page_of(found, _shown, lambda each: each.id, after, limit))

        @router.get("/{job_id}/checkpoints")
        async def checkpoints(job_id: str, after: str | None = None, limit: Limit = 10) -> JSONResponse:
            """The versions that were published while the job ran, the newest first."""
            found = self._jobs.checkpoints(self._jobs.get(job_id))
            return JSONResponse(page_of(found, _shown, lambda each: each.id, after, limit))

    async def _make(self, body: JobRequest) -> FineTuningJob:
        if brings_python(body.method.reinforcement.grader) and not self._python:
            message = "a python grader needs keys: set fine_tuning.admin_keys (WEIR_ADMIN_KEYS)"
            raise ApiError(403, message, param="method.reinforcement.grader")
        self._jobs.check_room()
        try:
            model = await self._policy.model_name()
        except GatewaySilent as error:
            raise ApiError(503, str(error)) from error
        if body.model != model:
            raise BadInput(f"the deployment trains {model!r}, and no {body.model[:100]!r}", "model")
        asked = body.method.reinforcement.hyperparameters.for_evaluations
        if asked and body.validation_file is None:
            name = f"method.reinforcement.hyperparameters.{asked[0]}"
            raise BadInput(f"{name} needs a validation_file", name)
        try:
            await self._runner.check(body.method.reinforcement.grader, "method.reinforcement.grader")
        except UnusableSource as error:
            raise BadInput(str(error), error.where) from error
        for name, path in self._given(body).items():
            await self._check(path, f"{name}_file")
        given = self._given(body)  # one may have been deleted meanwhile
        job = FineTuningJob(
            id=f"ftjob-{new_id()}",
            number=self._jobs.next_number,
            created_at=int(clock.now()),
            request=body.model_dump(mode="json", exclude_unset=True),
            model=model,
            seed=random.randrange(2**31) if body.seed is None else body.seed,
        )
        try:
            msgspec.json.encode(job)
        except UnicodeEncodeError:  # JSON may escape half a character, which UTF-8 has not
            raise BadInput("the job has a text that is no Unicode: a lone surrogate", "method") from None
        directory = self._jobs.path(job)
        directory.mkdir()
        for name, path in given.items():  # links: a file that is deleted stays with its jobs
            os.link(path, directory / f"{name}.jsonl")
        self._queue.add(job)
        return job

    def _given(self, body: JobRequest) -> dict[str, Path]:
        """The files of a job. Raises BadInput."""
        files = {"training": body.training_file, "validation": body.validation_file}
        return {
            name: self._files.path(self._files.get(file_id, f"{name}_file"))
            for name, file_id in files.items()
            if file_id is not None
        }

    async def _check(self, path: Path, param: str) -> None:
        """Raises BadInput."""
        try:
            await asyncio.to_thread(RowFile, path, self._limits)
        except (BadRow, FileNotFoundError) as error:
            raise BadInput(
                str(error) if isinstance(error, BadRow) else "the file was deleted", param
            ) from error


def _selected(job: FineTuningJob, request: Request) -> bool:
    metadata = job.request.get("metadata")
    if request.query_params.get("metadata") == "null":
        return metadata is None
    wanted = {
        name[len("metadata[") : -1]: value
        for name, value in request.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    return all((metadata or {}).get(name) == value for name, value in wanted.items())
