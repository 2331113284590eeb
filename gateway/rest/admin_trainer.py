"""The operators' routes for the trainer: the gateway passes requests on, and returns the trainer's replies.

operator ── POST /admin/trainer/pause ──▶ gateway ── POST /pause, at the URL in its report ──▶ trainer

`GET /admin/learning`: the curves of the run, from the trainer, in at most 1000 buckets.

The operators' routes from a version back to what taught it, and from a group to its advantages.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import urlencode

import aiohttp
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, Response

from gateway.operators.lineage import GroupShape, LineageShape, group_of, lineage_of
from gateway.parts import GatewayParts, parts_of
from rollout_queue import clock
from rollout_queue.http.callers import bearer
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import JsonRoute
from rollout_queue.protocol.conditions import ConditionFacts, trainer_missing, trainer_silent
from rollout_queue.protocol.message import LARGEST
from rollout_queue.protocol.trainer_messages import (
    MOST_BUCKETS,
    MOST_METRIC_NAMES,
    RestoreBody,
    TrainerReport,
)
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored

ANSWER_TIMEOUT_S = 10.0
CHECKPOINT_TIMEOUT_S = 90.0
"""Longer than the trainer itself waits for a checkpoint before it answers with 504."""
LEDGER_LIMIT = TASKS_LIMIT = 1000

Answer = Awaitable[tuple[int, bytes]]
"""The status and the body of the trainer's answer."""

router = APIRouter(route_class=JsonRoute)


@router.post("/trainer/pause")
async def pause_trainer(request: Request) -> Response:
    """Let the training pause before the next step."""
    return await asked_of_trainer(parts_of(request), "POST", "/pause")


@router.post("/trainer/resume")
async def resume_trainer(request: Request) -> Response:
    """Continue the training, also after a guard has paused it."""
    return await asked_of_trainer(parts_of(request), "POST", "/resume")


@router.post("/trainer/checkpoint")
async def checkpoint_trainer(request: Request) -> Response:
    """Write a checkpoint after the running step. The answer comes when the checkpoint is durable."""
    return await asked_of_trainer(parts_of(request), "POST", "/checkpoint", timeout_s=CHECKPOINT_TIMEOUT_S)


@router.get("/trainer/rollback")
async def trainer_rollbacks(request: Request) -> Response:
    """The versions that the training can go back to, and when it did so."""
    return await asked_of_trainer(parts_of(request), "GET", "/rollback")


@router.post("/trainer/rollback")
async def roll_trainer_back(body: RestoreBody, request: Request) -> Response:
    """Continue from the weights and the optimizer of an older version, under a new version number."""
    gateway = parts_of(request)

    def ask(url: str) -> Answer:
        return gateway.engine.post(f"{url}/rollback", body, CHECKPOINT_TIMEOUT_S, _headers(gateway))

    return await _answered(gateway, ask)


@router.get("/trainer/status")
async def trainer_status(request: Request) -> Response:
    """What the trainer itself says of its state."""
    return await asked_of_trainer(parts_of(request), "GET", "/status")


@router.get("/trainer/ledger")
async def trainer_ledger(
    request: Request,
    since: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=LEDGER_LIMIT)] = LEDGER_LIMIT,
) -> Response:
    """The turns that each durable step after `since` trained."""
    return await asked_of_trainer(parts_of(request), "GET", f"/ledger?since={since}&limit={limit}")


@router.get("/trainer/tasks")
async def trainer_tasks(
    request: Request,
    cursor: str = "",
    limit: Annotated[int, Query(ge=1, le=TASKS_LIMIT)] = TASKS_LIMIT,
) -> Response:
    """How often the policy solves each task, and the weight that the trainer's curriculum gives to it."""
    query = urlencode({"cursor": cursor, "limit": limit})
    return await asked_of_trainer(parts_of(request), "GET", f"/tasks?{query}")


async def asked_of_trainer(
    gateway: GatewayParts, method: str, path: str, timeout_s: float = ANSWER_TIMEOUT_S
) -> Response:
    """The trainer's answer to a request without a body. Raises ApiError if it cannot be reached."""
    return await _answered(
        gateway,
        lambda url: gateway.engine.request(method, f"{url}{path}", timeout_s, _headers(gateway)),
    )


async def _answered(gateway: GatewayParts, ask: Callable[[str], Answer]) -> Response:
    """The trainer's answer. `ask` gets the URL of its API."""
    url = await _trainer_url(gateway)
    try:
        status, body = await ask(url)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = str(error) or type(error).__name__
        raise _unavailable(f"the trainer at {url} does not answer: {why}") from error
    return Response(body, status, media_type="application/json")


def _headers(gateway: GatewayParts) -> dict[str, str]:
    """The authorization that the trainer expects of a gateway."""
    settings = gateway.settings
    return bearer(settings.trainer_key or next(iter(settings.admin_keys), None))


async def _trainer_url(gateway: GatewayParts) -> str:
    report = TrainerReport.of(await stored(gateway.redis.hgetall(key_names.TRAINER)))
    silent_s = gateway.settings.warnings.trainer_silent_s
    facts = ConditionFacts(now=clock.now(), trainer=report, trainer_silent_s=silent_s)
    if missing := trainer_missing(facts):
        raise _unavailable(missing)
    if report.url is None:
        raise _unavailable("the trainer has not reported its URL: it is older than this gateway")
    if silent := trainer_silent(facts):
        raise _unavailable(silent)
    return report.url


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, type="trainer_unavailable")


LEARNING_TIMEOUT_S = 30.0
"""The first request for a metric reads a part of the run's file."""
MOST_RUN = 500
"""Characters of a run's name, which is a path in the trainer's folder of metrics."""


@router.get("/learning")
async def learning(
    request: Request,
    metrics: Annotated[str, Query(max_length=MOST_METRIC_NAMES)] = "reward_mean",
    start: Annotated[int | None, Query(alias="from", ge=0)] = None,
    end: Annotated[int | None, Query(alias="to", ge=0)] = None,
    buckets: Annotated[int, Query(ge=1, le=MOST_BUCKETS)] = MOST_BUCKETS,
    run: Annotated[str | None, Query(max_length=MOST_RUN)] = None,
) -> Response:
    """Each of the metrics, whose names have commas between them, from step `from` to step `to`: min, mean and
    max of each bucket; of another run if `run` names one of `GET /admin/learning/runs`. While `complete` is
    false, the trainer has not read the whole file: ask again."""
    given = {"metrics": metrics, "from": start, "to": end, "buckets": buckets, "run": run}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    return await asked_of_trainer(parts_of(request), "GET", f"/learning?{query}", LEARNING_TIMEOUT_S)


@router.get("/learning/runs")
async def kept_runs(request: Request) -> Response:
    """The other runs whose metrics the trainer finds beside those of this one, the newest first."""
    return await asked_of_trainer(parts_of(request), "GET", "/learning/runs", LEARNING_TIMEOUT_S)


@router.get("/policies/{version}/lineage", responses={200: {"model": LineageShape}})
async def lineage(
    version: Annotated[int, Path(ge=0, lt=LARGEST)],
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
) -> Response:
    """The steps that made a version out of the published version before it, and a page of their turns.

    Redis has the last 50,000 steps, and turns as long as their sessions; so the trainer need not run.
    """
    return JSONResponse(await lineage_of(parts_of(request).redis, version, limit, cursor))


@router.get("/groups/{group_id}", responses={200: {"model": GroupShape}})
async def group(group_id: str, request: Request) -> Response:
    """A group with the reward, advantage and verdict of each member."""
    gateway = parts_of(request)
    return JSONResponse(await group_of(gateway.redis, gateway.sessions.verdicts, group_id))
