"""The routes: OpenAI's for graders, with its names, and the operator's for what the dispatcher does.

POST /v1/fine_tuning/alpha/graders/validate {grader}                 ──▶ the grader, or a 400
POST /v1/fine_tuning/alpha/graders/run {grader, model_sample, item}  ──▶ reward, sub_rewards, metadata

A bounded number of grader requests runs at once, and a bounded number waits.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from reward_service.dispatch.dispatcher import Dispatcher
from reward_service.grader_runner import GraderRunner
from reward_service.graders.grade import Grade, UnusableSource, sample_of
from reward_service.graders.grader_objects import AnyGrader, brings_python
from reward_service.judging import Allowances
from reward_service.reward_metrics import RewardMetrics
from rollout_queue import clock
from rollout_queue.foreign_json import MOST_VALUES
from rollout_queue.http.callers import Role, admins_only, digest, presented_key, role_in
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import JsonRoute


class Slots:
    """Admits `at_once` requests; `waiting` more wait, and any further one is refused."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._most = at_once + waiting
        self.taken = 0
        """Requests that are admitted or wait."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Raises ApiError (429)."""
        if self.taken >= self._most:
            raise ApiError(429, f"{self.taken} requests are being graded, and no more may wait")
        self.taken += 1
        try:
            async with self._free:
                yield
        finally:
            self.taken -= 1


MAX_SAMPLE_CHARS = 2**20


class GraderRoute(JsonRoute):
    """A route whose body has a model's text, and any item of a dataset."""

    most_values = MOST_VALUES


def _json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError("it contains NaN, Infinity, or is nested too deeply") from error
    return value


class GraderBody(BaseModel):
    """The body of `validate`."""

    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0)

    grader: AnyGrader


class GraderRunBody(GraderBody):
    """The body of `run`."""

    model_sample: str = Field(max_length=MAX_SAMPLE_CHARS)
    item: Annotated[dict[str, Any] | None, AfterValidator(_json)] = None


class GraderRoutes:
    """Runs the graders that requests bring."""

    def __init__(
        self,
        runner: GraderRunner,
        allowances: Allowances,
        slots: Slots,
        metrics: RewardMetrics,
        timeout_s: float,
        bring_python: Set[Role],
    ) -> None:
        self._runner, self._slots, self._metrics = runner, slots, metrics
        self._allowances = allowances
        self._timeout_s = timeout_s
        self._bring_python = bring_python
        """Who may bring Python graders. Without keys nobody may: every program of the machine is an admin."""

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/fine_tuning/alpha/graders", tags=["graders"], route_class=GraderRoute)

        @router.post("/validate")
        async def validate(body: GraderBody, request: Request) -> JSONResponse:
            """Check a grader without running it. The source of a Python grader is loaded."""
            self._refuse_python(request, body.grader)
            if brings_python(body.grader):
                async with self._slots.one():
                    await self._check(body.grader)
            return JSONResponse({"grader": _shown(body.grader)})

        @router.post("/run")
        async def run(body: GraderRunBody, request: Request) -> JSONResponse:
            """Run a grader on an answer of a model and an item of a dataset."""
            runner = self._runner_for(request, body.grader)
            async with self._slots.one():
                await self._check(body.grader)
                started = clock.monotonic()
                grade = await self._graded(runner, body)
                seconds = clock.monotonic() - started
            self._metrics.ran(body.grader.type, seconds, failed=grade.errors.any)
            return JSONResponse(answer_of(body.grader, grade, seconds))

        return router

    def _runner_for(self, request: Request, grader: AnyGrader) -> GraderRunner:
        """What runs the caller's grader. Raises ApiError for a grader that the caller may not bring."""
        self._refuse_python(request, grader)
        if role_in(request) == "admin":
            return self._runner
        return self._runner.asking(self._allowances.of(digest(presented_key(request.headers) or ""), grader))

    def _refuse_python(self, request: Request, grader: AnyGrader) -> None:
        """Raises ApiError if the caller may not bring Python graders, and this is one."""
        if brings_python(grader) and role_in(request) not in self._bring_python:
            needed = "an admin key, or rewards.python.from_clients"
            if not self._bring_python:
                needed = "keys: set rewards.admin_keys (WEIR_ADMIN_KEYS)"
            raise ApiError(403, f"a python grader needs {needed}", param="grader.type")

    async def _check(self, grader: AnyGrader) -> None:
        """Raises ApiError for a Python grader that could grade nothing."""
        try:
            async with clock.timeout(self._timeout_s):
                await self._runner.check(grader)
        except UnusableSource as error:
            raise ApiError(400, str(error), param=error.where) from error
        except TimeoutError:
            message = f"its sources were not loaded within {self._timeout_s:.0f} s"
            raise ApiError(400, message, param="grader") from None

    async def _graded(self, runner: GraderRunner, body: GraderRunBody) -> Grade:
        variables = {"sample": sample_of(body.model_sample), "item": body.item or {}}
        try:
            async with clock.timeout(self._timeout_s):
                return await runner.run(body.grader, variables)
        except TimeoutError:
            return Grade.failed(unresponsive_reward_error=True)


def _shown(grader: AnyGrader) -> dict[str, Any]:
    """The grader as it was given."""
    return grader.model_dump(mode="json", exclude_unset=True)


def answer_of(grader: AnyGrader, grade: Grade, seconds: float) -> dict[str, Any]:
    """The answer of `run`, as OpenAI's clients read it."""
    total = sum(usage.total_tokens for usage in grade.usage.values())
    return {
        "reward": grade.reward,
        "sub_rewards": dict(grade.sub_rewards),
        "metadata": {
            "name": grader.name or grader.type,
            "type": grader.type,
            "errors": dict(vars(grade.errors)),
            "execution_time": seconds,
            "scores": dict(grade.sub_rewards),
            "token_usage": total if grade.usage else None,
            "sampled_model_name": grade.sampled_model,
        },
        "model_grader_token_usage_per_model": {
            name: dict(vars(usage)) for name, usage in grade.usage.items()
        },
    }


def dispatch_routes(dispatcher: Dispatcher, isolated: bool | None) -> APIRouter:
    """`isolated`: whether Python graders are; None if nobody has tried."""
    router = APIRouter(tags=["dispatch"], dependencies=[Depends(admins_only)])

    @router.get("/status")
    async def status() -> JSONResponse:
        """How many sessions wait for each rule, the last dead letters, and if Python graders are isolated."""
        memory = dispatcher.memory
        return JSONResponse(
            {
                "gateway_fault": dispatcher.gateway_fault,
                "waiting": dict(dispatcher.waiting),
                "in_work": memory.in_work,
                "remembered": memory.remembered,
                "python_isolated": isolated,
                "dead_letters": [dataclasses.asdict(each) for each in memory.letters],
            }
        )

    @router.post("/dead_letters/retry")
    async def retry() -> JSONResponse:
        """Try all dead letters again, with all attempts."""
        return JSONResponse({"retried": dispatcher.memory.revive()})

    return router
