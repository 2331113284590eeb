"""`GET /admin/learning`: the curves of the run, from the trainer, in at most 1000 buckets."""

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from gateway.parts import parts_of
from gateway.rest.admin.trainer import asked_of_trainer
from rollout_queue.protocol.trainer import MOST_BUCKETS, MOST_METRIC_NAMES

router = APIRouter()

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
