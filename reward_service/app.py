"""The reward service: its routes, its dispatcher, and what they share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import httpx
from fastapi import FastAPI

from reward_service.dispatch.dispatcher import Dispatcher
from reward_service.dispatch.gateway import SessionGateway
from reward_service.dispatch.handlers import GroupHandler, RewardPoster, RuleHandler, SessionHandler
from reward_service.dispatch.reward_rules import (
    EnvRule,
    GraderRule,
    HttpRule,
    JudgeRule,
    OpenAiGraderRule,
    PythonRule,
    RelativeRule,
)
from reward_service.dispatch.session_graders import (
    HttpGraderCall,
    HttpGroupGrader,
    HttpSessionGrader,
    ObjectSessionGrader,
    PythonSessionGrader,
    RelativeGroupGrader,
    judge_of,
)
from reward_service.dispatch.waiting_sessions import SessionGrader
from reward_service.grader_routes import GraderRoutes, Slots, dispatch_routes
from reward_service.grader_runner import GraderRunner
from reward_service.graders.grader_objects import AnyGrader, PythonGrader, brings_python
from reward_service.judging import Allowances, GatewayModel, JudgeModelClient, OpenAiModel
from reward_service.python_sandbox import WITHOUT, PythonProcesses
from reward_service.reward_metrics import RewardMetrics
from reward_service.settings import RewardSettings
from rollout_queue.http.api_page import api_page
from rollout_queue.http.body_limit import BodyLimit
from rollout_queue.http.callers import CallerCheck, Keyring, Role
from rollout_queue.http.errors import RequestIds, install_error_handlers
from rollout_queue.http.probe_routes import probes, text_of


@dataclass(frozen=True)
class RewardParts:
    """What the routes and the dispatcher share."""

    settings: RewardSettings
    gateway: httpx.AsyncClient
    outside: httpx.AsyncClient
    """For graders and models elsewhere."""
    metrics: RewardMetrics
    python: PythonProcesses
    judge: JudgeModelClient
    runner: GraderRunner

    @classmethod
    def of(cls, settings: RewardSettings) -> "RewardParts":
        gateway = httpx.AsyncClient(
            base_url=settings.gateway_url, headers=settings.gateway_headers, trust_env=False
        )
        outside = httpx.AsyncClient()
        python = PythonProcesses(settings.python)
        own = settings.judge.base_url is None
        judge = GatewayModel(settings.judge, gateway) if own else OpenAiModel(settings.judge, outside)
        return cls(settings, gateway, outside, RewardMetrics(), python, judge, GraderRunner(python, judge))

    def rules(self, gateway: SessionGateway) -> list[RuleHandler | EnvRule]:
        """What works for each rule. Raises OSError or ValueError for a rule that cannot work."""
        poster = RewardPoster(gateway, self.settings.dispatch.backoff_limit_s)
        return [
            rule if isinstance(rule, EnvRule) else self._handler_of(rule, gateway, poster)
            for rule in self.settings.rules
        ]

    def _handler_of(self, rule: GraderRule, gateway: SessionGateway, poster: RewardPoster) -> RuleHandler:
        match rule:
            case RelativeRule():
                compares = RelativeGroupGrader(rule, self.judge)
                return GroupHandler(rule, compares, gateway, poster, self.metrics)
            case HttpRule(per="group"):
                grades = HttpGroupGrader(self._call_of(rule), f"{rule.kind}:{rule.name}")
                return GroupHandler(rule, grades, gateway, poster, self.metrics)
        return SessionHandler(rule, self._grader_of(rule), gateway, poster, self.metrics)

    def _call_of(self, rule: HttpRule) -> HttpGraderCall:
        return HttpGraderCall(rule, self.outside, self.settings.dispatch.answer_bytes)

    def _grader_of(self, rule: HttpRule | PythonRule | OpenAiGraderRule | JudgeRule) -> SessionGrader:
        match rule:
            case HttpRule():
                return HttpSessionGrader(self._call_of(rule))
            case PythonRule():
                return PythonSessionGrader(self.python, rule.read_source(), rule.timeout_s)
            case OpenAiGraderRule():
                return ObjectSessionGrader(self.runner, rule.grader)
            case JudgeRule():
                return ObjectSessionGrader(self.runner, judge_of(rule))


async def check_rules(settings: RewardSettings, *, isolated: bool) -> None:
    """Load the Python graders of all rules.

    Raises UnusableSource for one that could grade nothing, ValueError for one that may not run here, OSError.
    """
    parts = RewardParts.of(settings)
    async with parts.gateway, parts.outside:
        for number, rule in enumerate(settings.rules):
            where = f"rewards.rules.{number}"
            match rule:
                case PythonRule():
                    grader: AnyGrader = PythonGrader(type="python", source=rule.read_source())
                case OpenAiGraderRule():
                    grader, where = rule.grader, f"{where}.grader"
                case _:
                    continue
            if brings_python(grader) and settings.python.required and not isolated:
                raise ValueError(f"{where}: rewards.python.isolation is required, but {WITHOUT}")
            await parts.runner.check(grader, where)


def create_app(settings: RewardSettings, *, isolated: bool | None = None) -> FastAPI:
    """`isolated`: whether Python graders are; None if nobody has tried.

    Raises OSError or ValueError for a rule that cannot work.
    """
    parts = RewardParts.of(settings)
    gateway = SessionGateway(parts.gateway, settings.dispatch)
    dispatcher = Dispatcher(gateway, parts.rules(gateway), settings.dispatch, parts.metrics)
    slots = Slots(settings.limits.runs, settings.limits.waiting)
    measure(parts, dispatcher, slots)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with parts.gateway, parts.outside:
            task = asyncio.create_task(dispatcher.run()) if settings.rules else None
            yield
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await parts.judge.close()

    async def readiness() -> str | None:
        return dispatcher.gateway_fault

    keyring = Keyring(settings.client_keys, settings.admin_keys)
    app = FastAPI(title="Weir reward service", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, most_bytes=settings.limits.body_bytes)
    app.add_middleware(CallerCheck, keyring=keyring, callers={"client", "admin"})
    app.add_middleware(RequestIds)
    install_error_handlers(app)
    app.include_router(probes(readiness, text_of(parts.metrics.registry)))
    python: set[Role] = {"client", "admin"} if settings.python.from_clients else {"admin"}
    run_timeout_s, allowances = settings.limits.run_timeout_s, Allowances(parts.judge, settings.judge)
    routes = GraderRoutes(
        parts.runner, allowances, slots, parts.metrics, run_timeout_s, set() if keyring.open else python
    )
    app.include_router(routes.router())
    app.include_router(dispatch_routes(dispatcher, isolated))
    app.include_router(api_page(app))
    return app


def measure(parts: RewardParts, dispatcher: Dispatcher, slots: Slots) -> None:
    metrics, memory = parts.metrics, dispatcher.memory
    metrics.gauge("python_processes", "Processes of Python graders", lambda: parts.python.running)
    metrics.gauge("requests", "Requests that are graded or wait", lambda: slots.taken)
    metrics.gauge("sessions_in_work", "Sessions that are graded or wait for it", lambda: memory.in_work)
    metrics.gauge("sessions_remembered", "Sessions that failed or got no opinion", lambda: memory.remembered)
    metrics.of_rules(
        "queue",
        "Sessions that wait for a rule",
        list(dispatcher.waiting),
        lambda rule: dispatcher.waiting[rule],
    )
