"""The gateway's application: its collaborators, its routes, its errors.

agent ──▶ /v1/… ──▶ door ▸ dialect ▸ belonging ▸ conversation ▸ sampling ▸ engine ▸ record ──▶ Redis
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

from fastapi import FastAPI
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from gateway.admission.admission import Admission
from gateway.collaborators import Collaborators
from gateway.conversations.conversation import forget_openings
from gateway.conversations.digests import forget_parts
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.messages import CountTokens, Messages
from gateway.dialects.responses import Responses
from gateway.edge.asgi import Desk, Door
from gateway.edge.errors import install_gateway_errors
from gateway.edge.exchange import Exchange
from gateway.edge.retries import Flights
from gateway.engines.engine import EngineClient, drain, transport_of
from gateway.engines.failover import Sampler
from gateway.engines.fleet import Fleet
from gateway.engines.policies import Policies
from gateway.generations.generator import Generator
from gateway.generations.recorder import Recorder
from gateway.language.render import ChatRenderer
from gateway.metrics import Metrics
from gateway.operators.pipeline import Pipeline
from gateway.operators.watch import Watch
from gateway.rest import admin, heartbeat, listing, models, rewards, users
from gateway.rest.bodies import Bodies
from gateway.rest.openapi import described
from gateway.sessions import sessions
from gateway.sessions.belonging import Belonging
from gateway.sessions.identity import Identities
from gateway.sessions.retention import Retention
from gateway.sessions.sessions import Sessions
from gateway.settings import GatewaySettings
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.errors import RequestIds, install_error_handlers
from rollout_queue.http.keys import Keyring
from rollout_queue.http.probes import probes
from rollout_queue.redis import keys
from rollout_queue.redis.deletion import RedisDeleter
from rollout_queue.redis.writer import RedisWriter

logger = logging.getLogger(__name__)

EXPIRE_BATCH = 100
TEXTS_S = 60.0
"""How often a gateway forgets the texts that it remembers to spare work: they may have been deleted since."""
DESKS: dict[str, Desk] = {
    "/v1/chat/completions": Exchange(Chat()),
    "/v1/completions": Exchange(Completions()),
    "/v1/responses": Exchange(Responses()),
    "/v1/messages": Exchange(Messages()),
    "/v1/messages/count_tokens": CountTokens(),
}
"""Who serves an agent's path, with or without a session before it."""


def create_app(settings: GatewaySettings) -> ASGIApp:
    """The application. It opens its connections when it starts and closes them when it ends."""
    renderer = ChatRenderer(settings.model_path, settings.renderer, settings.thinking)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        parts = await _open(settings, renderer, metrics)
        app.state.collaborators = door.gateway = parts
        every_s = settings.poll_every_s
        keeping = [asyncio.create_task(_repeat(work, parts, every_s)) for work in TASKS]
        keeping.append(asyncio.create_task(_repeat(_forget_texts, parts, TEXTS_S)))
        yield
        await drain(keeping)
        await parts.recorder.close()
        await parts.sampler.close()
        await parts.fleet.close()
        await parts.engine.close()
        await parts.writer.close()
        await parts.redis.aclose()

    metrics = Metrics()
    app = FastAPI(title="Weir gateway", version="1", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    install_error_handlers(app)
    install_gateway_errors(app)
    # A ticket names the address that the request came to, as a proxy says it. Nothing else asks who called
    # from where, so anybody may say it: whoever lies misleads nobody else.
    app.add_middleware(ProxyHeadersMiddleware, trusted_hosts="*")
    app.add_middleware(Bodies, limit_bytes=settings.max_body_bytes)
    app.add_middleware(RequestIds)
    app.include_router(models.router)
    app.include_router(sessions.router)
    app.include_router(listing.router)
    app.include_router(heartbeat.router)
    app.include_router(rewards.router)
    app.include_router(admin.router)
    app.include_router(users.router)
    app.include_router(probes(lambda: _unready(app), metrics.registry))
    vars(app)["openapi"] = lambda: described(app)
    door = Door(app, DESKS)
    return door


async def _open(settings: GatewaySettings, renderer: ChatRenderer, metrics: Metrics) -> Collaborators:
    redis = Redis.from_url(settings.redis_url, socket_connect_timeout=2, socket_timeout=10)
    writer = RedisWriter(redis)
    engine = EngineClient(transport_of(settings.engine_http, settings.engine_timeout_s))
    identities = Identities(Keyring(settings.client_keys, settings.admin_keys), await _secret(redis))
    admin_key = settings.admin_keys[0] if settings.admin_keys else None
    fleet = Fleet(redis, engine, admin_key, settings.engines)
    admission = Admission(settings.limits, redis, fleet, metrics, settings.poll_every_s)
    guard = Sessions(settings, writer, identities, admission)
    recorder = Recorder(settings, renderer, writer, metrics)
    sampler = Sampler(
        engine,
        fleet,
        metrics,
        text_of=renderer.text_of,
        vocab_size=renderer.config.vocab_size,
        engine_wait_s=settings.engine_wait_s,
        patience_s=settings.failover_patience_s,
    )
    return Collaborators(
        settings=settings,
        identities=identities,
        renderer=renderer,
        redis=redis,
        writer=writer,
        deleter=RedisDeleter(redis),
        engine=engine,
        fleet=fleet,
        policies=Policies(redis, fleet, settings.push_timeout_s),
        admission=admission,
        sessions=guard,
        belonging=Belonging(guard, writer, admission),
        sampler=sampler,
        generator=Generator(settings, renderer, sampler, recorder),
        recorder=recorder,
        flights=Flights(settings.retry_grace_s, settings.join_identical),
        metrics=metrics,
        pipeline=Pipeline(redis),
        watch=Watch(settings.warnings, settings.limits, redis),
        retention=Retention(settings, redis, metrics),
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


async def _look(gateway: Collaborators) -> None:
    """Know what waits downstream, what other gateways let in, and how sessions end."""
    await gateway.admission.refresh()
    await gateway.watch.refresh()


async def _forget(gateway: Collaborators) -> None:
    """Let go of what was deleted, and finish what a gateway that died has begun to delete."""
    try:
        await gateway.writer.forget_deleted()
        await gateway.deleter.finish(time.time())
    except StorageUnavailable as error:
        logger.warning("deleted sessions cannot be looked for: %s", error)


async def _forget_texts(gateway: Collaborators) -> None:
    """Begin to remember anew."""
    gateway.renderer.forget()
    forget_openings()
    forget_parts()


async def _retain(gateway: Collaborators) -> None:
    """Keep settled sessions as long as they are to be kept, and as there is room."""
    try:
        await gateway.retention.refresh()
    except StorageUnavailable as error:
        logger.warning("settled sessions cannot be forgotten: %s", error)


TASKS = (_keep, _expire, _look, _forget, _retain)
"""What a gateway does beside its calls, every `poll_every_s`."""


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
