"""The gateway's application: its routes, and which dialect answers which of the agents' paths.

agent ──▶ /v1/… ──▶ edge ▸ dialect ▸ session ▸ conversation ▸ sampling ▸ engine ▸ record ──▶ Redis
agent ──▶ /sessions, /groups, reward, finish
operator ──▶ /admin/…
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from redis.exceptions import RedisError
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from gateway.background import background_tasks
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.messages import Messages
from gateway.dialects.responses import Responses
from gateway.edge.asgi import EdgeApp, Endpoint
from gateway.edge.errors import install_gateway_errors
from gateway.edge.exchange import Exchange
from gateway.edge.retries import InFlightCalls
from gateway.edge.token_count import TokenCount
from gateway.language.render import ChatRenderer
from gateway.metrics import Metrics
from gateway.rest import admin, heartbeat, listing, models, rewards, sessions, users
from gateway.rest.json_bodies import JsonBodies
from gateway.rest.openapi import openapi_document
from gateway.settings import GatewaySettings
from gateway.wiring import Collaborators, opened
from rollout_queue.http.errors import RequestIds, install_error_handlers
from rollout_queue.http.probes import probes


def create_app(settings: GatewaySettings) -> ASGIApp:
    """The application. It opens its connections when it starts, and closes them when it ends."""
    renderer = ChatRenderer(settings.model_path, settings.renderer, settings.thinking)
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened(settings, renderer, metrics) as gateway:
            app.state.collaborators = gateway
            edge.endpoints = endpoints_of(gateway)
            async with background_tasks(gateway):
                yield

    app = FastAPI(title="Weir gateway", version="1", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    install_error_handlers(app)
    install_gateway_errors(app)
    # Only the tickets of new sessions use the address that a proxy reports, so any sender may report it:
    # a false one misleads its own sender alone.
    app.add_middleware(ProxyHeadersMiddleware, trusted_hosts="*")
    app.add_middleware(JsonBodies, limit_bytes=settings.max_body_bytes)
    app.add_middleware(RequestIds)
    for routes in (models, sessions, listing, heartbeat, rewards, admin, users):
        app.include_router(routes.router)
    app.include_router(probes(lambda: _why_not_ready(app), metrics.registry))
    vars(app)["openapi"] = lambda: openapi_document(app)
    edge = EdgeApp(app, settings.max_body_bytes)
    return edge


def endpoints_of(gateway: Collaborators) -> Mapping[str, Endpoint]:
    """The agents' paths, each also served under `/sessions/{id}`."""
    renderer, model_name = gateway.renderer, gateway.settings.model_name
    calls = InFlightCalls(gateway.settings.retry_grace_s, gateway.settings.join_identical)
    messages = Messages(renderer, model_name)
    return {
        "/v1/chat/completions": Exchange(Chat(renderer, model_name), gateway, calls),
        "/v1/completions": Exchange(Completions(renderer, model_name), gateway, calls),
        "/v1/responses": Exchange(Responses(renderer, model_name, gateway.redis), gateway, calls),
        "/v1/messages": Exchange(messages, gateway, calls),
        "/v1/messages/count_tokens": TokenCount(messages, gateway),
    }


async def _why_not_ready(app: FastAPI) -> str | None:
    """Why the gateway cannot answer a call; None when it can."""
    gateway: Collaborators = app.state.collaborators
    try:
        await gateway.redis.ping()
    except (RedisError, OSError) as error:
        return f"Redis does not answer: {error}"
    return gateway.fleet.why_no_server() if gateway.fleet.choose("") is None else None
