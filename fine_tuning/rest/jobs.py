"""OpenAI's routes for fine-tuning jobs."""

import asyncio
import os
import random
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from fine_tuning.errors import BadInput, BadRow
from fine_tuning.files.rows import RowFile
from fine_tuning.files.store import FileStore
from fine_tuning.job_queue import JobQueue
from fine_tuning.jobs.job import FineTuningJob, JobCheckpoint, JobEvent
from fine_tuning.jobs.request import JobRequest
from fine_tuning.jobs.store import JobStore
from fine_tuning.rest.pages import page_of
from fine_tuning.settings import FineTuningLimits
from fine_tuning.training.versions import GatewaySilent, PolicyWatch
from reward_service.graders.faults import UnusableSource
from reward_service.graders.objects import brings_python
from reward_service.grading.runner import GraderRunner
from rollout_queue import clock
from rollout_queue.contract.ids import new_id
from rollout_queue.http.bodies.json_routes import JsonRoute
from rollout_queue.http.errors import ApiError

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


def _shown(value: JobEvent | JobCheckpoint) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found
