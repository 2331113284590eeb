"""The operators' routes for the trainer: the gateway passes requests on, and returns the trainer's replies.

operator ── POST /admin/trainer/pause ──▶ gateway ── POST /pause, at the URL in its report ──▶ trainer
"""

from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import urlencode

import aiohttp
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from gateway.parts import GatewayParts, parts_of
from rollout_queue import clock
from rollout_queue.http.bodies.json_routes import JsonRoute
from rollout_queue.http.errors import ApiError
from rollout_queue.http.keys import bearer
from rollout_queue.protocol.trainer import RestoreBody, TrainerReport
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

ANSWER_TIMEOUT_S = 10.0
CHECKPOINT_TIMEOUT_S = 90.0
"""Longer than the trainer itself waits for a checkpoint before it answers with 504."""
LEDGER_LIMIT = TASKS_LIMIT = 1000

Answer = Awaitable[tuple[int, bytes]]
"""The status and the body of the trainer's answer."""

router = APIRouter(prefix="/trainer", route_class=JsonRoute)


@router.post("/pause")
async def pause_trainer(request: Request) -> Response:
    """Let the training pause before the next step."""
    return await asked_of_trainer(parts_of(request), "POST", "/pause")


@router.post("/resume")
async def resume_trainer(request: Request) -> Response:
    """Continue the training, also after a guard has paused it."""
    return await asked_of_trainer(parts_of(request), "POST", "/resume")


@router.post("/checkpoint")
async def checkpoint_trainer(request: Request) -> Response:
    """Write a checkpoint after the running step. The answer comes when the checkpoint is durable."""
    return await asked_of_trainer(parts_of(request), "POST", "/checkpoint", timeout_s=CHECKPOINT_TIMEOUT_S)


@router.get("/rollback")
async def trainer_rollbacks(request: Request) -> Response:
    """The versions that the training can go back to, and when it did so."""
    return await asked_of_trainer(parts_of(request), "GET", "/rollback")


@router.post("/rollback")
async def roll_trainer_back(body: RestoreBody, request: Request) -> Response:
    """Continue from the weights and the optimizer of an older version, under a new version number."""
    gateway = parts_of(request)

    def ask(url: str) -> Answer:
        return gateway.engine.post(f"{url}/rollback", body, CHECKPOINT_TIMEOUT_S, _headers(gateway))

    return await _answered(gateway, ask)


@router.get("/status")
async def trainer_status(request: Request) -> Response:
    """What the trainer itself says of its state."""
    return await asked_of_trainer(parts_of(request), "GET", "/status")


@router.get("/ledger")
async def trainer_ledger(
    request: Request,
    since: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=LEDGER_LIMIT)] = LEDGER_LIMIT,
) -> Response:
    """The turns that each durable step after `since` trained."""
    return await asked_of_trainer(parts_of(request), "GET", f"/ledger?since={since}&limit={limit}")


@router.get("/tasks")
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
    report = TrainerReport.of(await stored(gateway.redis.hgetall(keys.TRAINER)))
    if report.last_seen is None:
        raise _unavailable("no trainer has reported yet")
    if report.url is None:
        raise _unavailable("the trainer has not reported its URL: it is older than this gateway")
    silent_s = clock.now() - report.last_seen
    if silent_s > gateway.settings.warnings.trainer_silent_s:
        raise _unavailable(f"the trainer has been silent for {silent_s:.0f} s")
    return report.url


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, type="trainer_unavailable")
