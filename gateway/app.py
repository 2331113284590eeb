"""The gateway's application: its routes, and which dialect answers which of the agents' paths.

agent ──▶ /v1/… ──▶ edge ▸ dialect ▸ session ▸ conversation ▸ sampling ▸ engine ▸ record ──▶ Redis
agent ──▶ /sessions, /groups, reward, finish
operator ──▶ /admin/…

`EdgeApp`   the outermost ASGI application: it hands an agent's call to the `Endpoint` of its path, and every
            other request to FastAPI
`Endpoint`  the object that serves one of the agents' paths: an `Exchange` or a `TokenCount`
`Exchange`  takes a model call from HTTP request to reply: session, sampling, recorded turn, answer
dialect     a public wire shape, such as OpenAI's chat completions: reads requests and writes answers
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from fastapi import FastAPI
from redis.exceptions import RedisError
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from gateway.callers.backpressure import full_redis
from gateway.dialects.base import Dialect
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.messages import Messages
from gateway.dialects.responses import Responses
from gateway.dialects.token_ids import TokenIdsDialect
from gateway.edge.asgi import EdgeApp, Endpoint, WrongKeys
from gateway.edge.background_answers import BackgroundAnswers
from gateway.edge.calls import InFlightCalls
from gateway.edge.errors import install_gateway_errors
from gateway.edge.exchange import Exchange, TokenCount
from gateway.edge.joins import JoinableCalls, Joins
from gateway.edge.request import BodyBudget
from gateway.errors import InvalidRequest
from gateway.language.render import ChatRenderer
from gateway.language.thinking import effort_of
from gateway.page import routes as page
from gateway.page.page_access import PageAccess
from gateway.page.page_parts import opened_page
from gateway.parts import GatewayParts, opened
from gateway.periodic_tasks import background_tasks, reload_on_hangup
from gateway.prometheus import Metrics
from gateway.rest import agent_routes, deployment, listing, rewards, sessions
from gateway.rest.admin_actions import LogAdminActions
from gateway.rest.bodies import JsonBodies
from gateway.rest.openapi import BODIES, openapi_document
from gateway.rest.workers import metrics_text, private_app
from gateway.settings import GatewaySettings
from gateway.tinker import tinker_routes
from gateway.tinker.door import opened_door
from rollout_queue.http.api_page import api_page
from rollout_queue.http.callers import public_hosts
from rollout_queue.http.errors import ApiError, RequestIds, install_error_handlers
from rollout_queue.http.probe_routes import probes
from rollout_queue.http.worker_processes import Siblings, Worker, private_server
from rollout_queue.redis.availability import refusal

ROUTES: Final = (agent_routes, sessions, listing, rewards, deployment, tinker_routes, page)
"""The modules of REST routes. The agents' paths are no routes: `EdgeApp` serves them."""


def create_app(settings: GatewaySettings, worker: Worker | None = None) -> EdgeApp:
    """The application of a gateway that is one process, or of one `worker` of several.

    Its lifespan opens the connections at the start, and closes them at the end."""
    renderer = _renderer(settings)
    metrics = Metrics()
    calls = InFlightCalls(settings.retry_grace_s, settings.join_identical)
    answers = BackgroundAnswers(settings.max_background_answers, settings.max_background_answers_per_key)
    siblings = Siblings() if worker is None else Siblings(worker.folder, worker.others)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened(settings, renderer, metrics) as gateway:
            app.state.parts = gateway
            edge.identities = gateway.identities
            edge.endpoints = endpoints_of(gateway, calls, Joins(siblings), answers)
            async with background_tasks(gateway), reload_on_hangup(gateway), AsyncExitStack() as stack:
                if worker is not None:
                    private = private_app(gateway, JoinableCalls(calls))
                    await stack.enter_async_context(private_server(worker, private))
                app.state.page = shown = await stack.enter_async_context(opened_page(gateway, siblings))
                edge.end_streams = shown.feed.close if shown else edge.end_streams
                app.state.tinker = await stack.enter_async_context(opened_door(gateway))
                yield
                await calls.close()
                await answers.close(settings.drain_timeout_s)
        await siblings.close()

    app = FastAPI(title="Weir gateway", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.siblings = siblings
    install_error_handlers(app, BODIES)
    install_gateway_errors(app)
    # The address that a proxy reports is used only in the `base_url` that the reply to POST /sessions and
    # POST /groups contains. A sender of a false address misleads only itself, so every sender is trusted.
    app.add_middleware(ProxyHeadersMiddleware, trusted_hosts="*")
    app.add_middleware(LogAdminActions)
    bodies = BodyBudget(
        settings.max_body_bytes, settings.max_bodies_bytes, settings.max_bodies_bytes_per_key, metrics
    )
    app.add_middleware(JsonBodies, bodies=bodies)
    app.add_middleware(PageAccess)
    app.add_middleware(RequestIds)
    for routes in ROUTES:
        # The routes as they are: `include_router` would make each one anew, at the first request, in 0.1 s.
        app.router.routes.extend(routes.router.routes)
    app.include_router(
        probes(lambda: _why_not_ready(app, edge), lambda: metrics_text(metrics.registry, worker, siblings))
    )
    app.include_router(api_page(app))
    vars(app)["openapi"] = lambda: openapi_document(app)
    wrong_keys, hosts = WrongKeys(settings.wrong_keys), public_hosts(settings.public_url)
    edge = EdgeApp(app, bodies, calls, answers, settings.leave_s, metrics.of("rest"), wrong_keys, hosts)
    return edge


def endpoints_of(
    gateway: GatewayParts, calls: InFlightCalls, joins: Joins, answers: BackgroundAnswers
) -> Mapping[str, Endpoint]:
    """The endpoint of each agents' path. `EdgeApp` also serves each path under `/sessions/{id}`."""
    renderer, model_name, of = gateway.renderer, gateway.settings.model_name, gateway.metrics.of
    messages = Messages(renderer, model_name, gateway.identities.thought_signature)
    token_ids = TokenIdsDialect(renderer, model_name, gateway.settings.router_replay)
    dialects: Mapping[str, tuple[str, Dialect]] = {
        "/v1/chat/completions": ("chat", Chat(renderer, model_name)),
        "/v1/completions": ("completions", Completions(renderer, model_name)),
        "/v1/responses": ("responses", Responses(renderer, model_name, gateway.redis)),
        "/v1/messages": ("messages", messages),
        "/inference/v1/generate": ("token_ids", token_ids),
    }
    return {
        **{
            path: Exchange(dialect, gateway, calls, joins, answers, of(name))
            for path, (name, dialect) in dialects.items()
        },
        "/v1/messages/count_tokens": TokenCount(messages, gateway, of("count_tokens")),
    }


def _renderer(settings: GatewaySettings) -> ChatRenderer:
    """The renderer of the model. Raises SystemExit if the model cannot do what the settings ask for."""
    own = (settings.renderer, settings.thinking, settings.context_length, settings.tool_prompt)
    renderer = ChatRenderer(settings.model_path, *own)
    if settings.router_replay and not renderer.config.num_experts_per_tok:
        raise SystemExit(f"gateway.router_replay: {settings.model_path} is no mixture of experts")
    field = "gateway.reasoning_effort"
    try:
        renderer.thinking(effort_of(settings.reasoning_effort, field), field)
    except InvalidRequest as error:
        raise SystemExit(error.message) from error
    return renderer


async def _why_not_ready(app: FastAPI, edge: EdgeApp) -> str | ApiError | None:
    """Why the gateway cannot answer a call; None when it can."""
    if edge.leaving:
        return "the gateway leaves, because it got SIGTERM"
    gateway: GatewayParts = app.state.parts
    try:
        await gateway.redis.ping()
    except (RedisError, OSError) as error:
        return _without_redis(refusal(error) or f"Redis does not answer: {error}")
    if full := full_redis(gateway.admission.backpressure):
        return _without_redis(full)
    return gateway.fleet.fault()


def _without_redis(why: str) -> ApiError:
    return ApiError(503, why, type="storage_unavailable")
