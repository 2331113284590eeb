"""The gateway's application: its collaborators, its routes, its errors.

agent ──▶ /v1/chat/completions ──▶ belonging ▸ conversation ▸ sampling ▸ engine ▸ record ──▶ Redis
agent ──▶ /sessions, /groups, reward, finish
operator ──▶ /admin/…
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.routing import Route

from gateway import admin, rewards, sessions
from gateway.belonging import Belonging
from gateway.bodies import Bodies
from gateway.chat import chat_completions
from gateway.collaborators import Collaborators, collaborators
from gateway.engine import EngineClient, drain
from gateway.fleet import Fleet
from gateway.generation import Generator
from gateway.identity import Identities
from gateway.metrics import Metrics
from gateway.policies import Policies
from gateway.render import ChatRenderer
from gateway.sessions import Sessions
from gateway.settings import GatewaySettings
from rollout_queue import keys
from rollout_queue.errors import StorageUnavailable
from rollout_queue.redis_writer import RedisWriter
from rollout_queue.web.errors import RequestIds, install_error_handlers
from rollout_queue.web.keys import Keyring
from rollout_queue.web.probes import probes

logger = logging.getLogger(__name__)

EXPIRE_BATCH = 100


def create_app(settings: GatewaySettings) -> FastAPI:
    """The application. It opens its connections when it starts and closes them when it ends."""
    renderer = ChatRenderer(settings.model_path, settings.renderer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        parts = await _open(settings, renderer, metrics)
        app.state.collaborators = parts
        every_s = settings.poll_every_s
        keeping = [asyncio.create_task(_repeat(work, parts, every_s)) for work in (_keep, _expire)]
        yield
        await drain(keeping)
        await parts.generator.close()
        await parts.engine.close()
        await parts.redis.aclose()

    metrics = Metrics()
    app = FastAPI(title="Weir gateway", version="1", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    install_error_handlers(app)
    app.add_middleware(Bodies, limit_bytes=settings.max_body_bytes)
    app.add_middleware(RequestIds)
    for prefix in ("", "/sessions/{session_id}"):
        app.router.routes.append(Route(f"{prefix}/v1/chat/completions", chat_completions, methods=["POST"]))
        app.add_api_route(f"{prefix}/v1/models", list_models, tags=["agent"])
    app.include_router(sessions.router)
    app.include_router(rewards.router)
    app.include_router(admin.router)
    app.include_router(probes(lambda: _unready(app), metrics.registry))
    return app


async def list_models(request: Request) -> JSONResponse:
    """The policy, under its public id."""
    gateway = collaborators(request)
    gateway.identities.caller(request)
    model = {"id": gateway.settings.model_name, "object": "model", "created": 0, "owned_by": "weir"}
    return JSONResponse({"object": "list", "data": [model]})


async def _open(settings: GatewaySettings, renderer: ChatRenderer, metrics: Metrics) -> Collaborators:
    redis = Redis.from_url(settings.redis_url, socket_connect_timeout=2, socket_timeout=10)
    writer = RedisWriter(redis)
    engine = EngineClient(settings.engine_timeout_s)
    identities = Identities(Keyring(settings.client_keys, settings.admin_keys), await _secret(redis))
    admin_key = settings.admin_keys[0] if settings.admin_keys else None
    fleet = Fleet(redis, engine, admin_key, settings.engines)
    guard = Sessions(settings, writer, identities)
    return Collaborators(
        settings=settings,
        identities=identities,
        renderer=renderer,
        redis=redis,
        writer=writer,
        engine=engine,
        fleet=fleet,
        policies=Policies(redis, fleet, settings.push_timeout_s),
        sessions=guard,
        belonging=Belonging(guard, writer),
        generator=Generator(settings, renderer, writer, engine, fleet, metrics),
        metrics=metrics,
    )


async def _secret(redis: Redis) -> bytes:
    """The signing secret that all gateways on this Redis share; made by the first. Waits for Redis."""
    while True:
        try:
            if (known := await cast(Awaitable[bytes | None], redis.get(keys.SECRET))) is not None:
                return known  # also when Redis is full, and would refuse to set it
            await redis.set(keys.SECRET, secrets.token_bytes(32), nx=True)
        except (RedisError, OSError) as error:
            logger.warning("waiting for Redis: %s", error)
            await asyncio.sleep(0.2)


async def _keep(gateway: Collaborators) -> None:
    """Know the fleet."""
    await gateway.fleet.refresh()
    metrics, fleet = gateway.metrics, gateway.fleet
    metrics.serving_version.set(fleet.serving if fleet.serving is not None else -1)
    metrics.servers.clear()
    for server in fleet.servers.values():
        metrics.servers.labels(server.state).inc()


async def _expire(gateway: Collaborators) -> None:
    """End sessions that nobody finished or rewarded in time."""
    try:
        while await gateway.writer.expire(time.time(), EXPIRE_BATCH) == EXPIRE_BATCH:
            pass
    except StorageUnavailable as error:
        logger.warning("overdue sessions cannot be closed: %s", error)


async def _repeat(
    work: Callable[[Collaborators], Awaitable[None]], gateway: Collaborators, every_s: float
) -> None:
    """Do the work again and again, for as long as the application runs; one failure does not end it."""
    while True:
        try:
            await work(gateway)
        except Exception:  # outermost frame of a task: without it the gateway would go blind in silence
            logger.exception("a task of the gateway failed")
        await asyncio.sleep(every_s)


async def _unready(app: FastAPI) -> str | None:
    """Why the gateway cannot answer a call; None when it can."""
    gateway: Collaborators = app.state.collaborators
    try:
        await gateway.redis.ping()
    except (RedisError, OSError) as error:
        return f"Redis does not answer: {error}"
    return gateway.fleet.why_nobody() if gateway.fleet.choose("") is None else None
