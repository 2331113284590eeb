"""The reward service: its routes, and what they share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI

from reward_service.grading.runner import GraderRunner
from reward_service.judging.models import GatewayModel, JudgeModelClient, OpenAiModel
from reward_service.metrics import RewardMetrics
from reward_service.rest.access import Access
from reward_service.rest.body_limit import BodyLimit
from reward_service.rest.graders import GraderRoutes
from reward_service.rest.slots import Slots
from reward_service.sandbox.process import PythonProcesses
from reward_service.settings import RewardSettings
from rollout_queue.http.errors import RequestIds, install_error_handlers
from rollout_queue.http.keys import Keyring
from rollout_queue.http.probes import probes, text_of


def create_app(settings: RewardSettings) -> FastAPI:
    metrics = RewardMetrics()
    gateway = httpx.AsyncClient(
        base_url=settings.gateway_url, headers=settings.gateway_headers, trust_env=False
    )
    outside = httpx.AsyncClient()
    python = PythonProcesses(settings.python)
    runner = GraderRunner(python, _judge(settings, gateway, outside))
    slots = Slots(settings.limits.runs, settings.limits.waiting)
    metrics.gauge("python_processes", "Processes of Python graders", lambda: python.running)
    metrics.gauge("requests", "Requests that are graded or wait", lambda: slots.taken)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway, outside:
            yield

    async def readiness() -> str | None:
        return None

    app = FastAPI(title="Weir reward service", lifespan=lifespan)
    app.add_middleware(BodyLimit, most_bytes=settings.limits.body_bytes)
    app.add_middleware(RequestIds)
    install_error_handlers(app)
    app.include_router(probes(readiness, text_of(metrics.registry)))
    limits, from_clients = settings.limits, settings.python.from_clients
    routes = GraderRoutes(runner, slots, metrics, limits.run_timeout_s, python=from_clients)
    app.include_router(routes.router(Access(Keyring(settings.client_keys, settings.admin_keys))))
    return app


def _judge(
    settings: RewardSettings, gateway: httpx.AsyncClient, outside: httpx.AsyncClient
) -> JudgeModelClient:
    if settings.judge.base_url is None:
        return GatewayModel(settings.judge, gateway)
    return OpenAiModel(settings.judge, outside)
