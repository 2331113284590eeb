"""The service for fine-tuning jobs: its routes, its queue, and what they share."""

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TextIO

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Gauge

from fine_tuning.errors import BadInput, DirectoryInUse
from fine_tuning.job_queue import JobQueue
from fine_tuning.job_routes import UPLOADS, JobRoutes, file_routes
from fine_tuning.job_trainer import JobTraining
from fine_tuning.jobs import FineTuningJob, JobStore
from fine_tuning.served_versions import PolicyWatch
from fine_tuning.settings import FineTuningSettings
from fine_tuning.training_files import FileStore
from reward_service.grader_runner import GraderRunner
from reward_service.judging import GatewayModel, OpenAiModel
from reward_service.python_sandbox import PythonProcesses
from rollout_queue.http.api_page import api_page
from rollout_queue.http.body_limit import BodyLimit
from rollout_queue.http.callers import CallerCheck, Keyring, bearer
from rollout_queue.http.errors import ApiError, RequestIds, install_error_handlers
from rollout_queue.http.probe_routes import probes, text_of

FORM_BYTES = 64 * 2**10
"""What an upload has besides its file."""
BODY_BYTES = 4 * 2**20
"""The largest body that is no upload."""


def create_app(settings: FineTuningSettings) -> FastAPI:
    """Raises DirectoryInUse, OSError."""
    lock = _taken(settings.directory)
    key = settings.gateway_key
    headers = bearer(key)
    gateway = httpx.AsyncClient(base_url=settings.gateway_url, headers=headers, trust_env=False)
    outside = httpx.AsyncClient()
    own = settings.judge.base_url is None
    judge = GatewayModel(settings.judge, gateway) if own else OpenAiModel(settings.judge, outside)
    runner = GraderRunner(PythonProcesses(settings.python), judge)
    policy = PolicyWatch(gateway)
    files = FileStore(settings.directory / "files", settings.limits)
    jobs = JobStore(settings.directory / "jobs", settings.limits)

    async def train(job: FineTuningJob) -> str:
        return await JobTraining(job, settings, jobs, runner, policy).train()

    queue = JobQueue(jobs, train, policy, settings.gateway_wait_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway, outside:
            running = asyncio.create_task(queue.run())
            yield
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await judge.close()
        lock.close()

    async def readiness() -> str | None:
        return queue.fault

    app = FastAPI(title="Weir fine-tuning jobs", lifespan=lifespan, docs_url=None, redoc_url=None)
    keyring = Keyring(settings.client_keys, settings.admin_keys)
    uploads = {UPLOADS: settings.limits.file_bytes + FORM_BYTES}
    app.add_middleware(BodyLimit, most_bytes=BODY_BYTES, of_paths=uploads)
    app.add_middleware(CallerCheck, keyring=keyring, callers={"admin"})
    app.add_middleware(RequestIds)
    install_error_handlers(app)
    app.add_exception_handler(BadInput, _answer)
    app.include_router(probes(readiness, text_of(registry_of(jobs, queue))))
    app.include_router(file_routes(files))
    routes = JobRoutes(jobs, files, queue, policy, settings.limits, runner, python=not keyring.open)
    app.include_router(routes.router())
    app.include_router(api_page(app))
    return app


def _taken(directory: Path) -> TextIO:
    """The lock of the directory, which the system releases when the process ends. Raises DirectoryInUse."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / "lock").open("w", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise DirectoryInUse(f"another service uses {directory}: set fine_tuning.directory") from None
    return lock


async def _answer(_: Request, error: Exception) -> Response:
    if not isinstance(error, BadInput):
        raise error
    return ApiError(error.status, str(error), param=error.param).response()


def registry_of(jobs: JobStore, queue: JobQueue) -> CollectorRegistry:
    registry = CollectorRegistry()
    waiting = Gauge("weir_fine_tuning_jobs_queued", "Jobs that wait for their turn", registry=registry)
    waiting.set_function(lambda: sum(job.status == "queued" for job in jobs.oldest_first))
    running = Gauge("weir_fine_tuning_jobs_running", "Jobs that train", registry=registry)
    running.set_function(lambda: queue.running)
    return registry
