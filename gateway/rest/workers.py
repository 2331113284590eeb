"""What the worker processes of one gateway tell each other: metrics, slow parts, changes, calls in flight.

request ──▶ one worker ── asks ──▶ the other workers, over Unix sockets that only their user can reach
"""

import logging
from collections.abc import Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from gateway.edge.joins import HAVE_PATH, JOIN_PATH, JoinableCalls
from gateway.metrics.calls import CallFigures
from gateway.metrics.distribution import TimeSpent
from gateway.wiring import GatewayParts
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.workers.merged_metrics import exported, merged
from rollout_queue.http.workers.siblings import Siblings
from rollout_queue.http.workers.worker import Worker

logger = logging.getLogger(__name__)

LIVE_PATH, METRICS_PATH, PARTS_PATH, CHANGED_PATH = "/live", "/metrics", "/parts", "/changed"
_parts = msgspec.json.Decoder(dict[str, tuple[float, int]])


def private_app(gateway: GatewayParts, joinable: JoinableCalls) -> Starlette:
    """The application that answers the other workers, and the parent's question whether this one lives."""

    async def live(_: Request) -> Response:
        return Response()

    async def metrics(_: Request) -> Response:
        return Response(exported(gateway.metrics.registry))

    async def parts(_: Request) -> Response:
        spent = sums_of(gateway.metrics.calls)
        return Response(
            msgspec.json.encode({name: (each.seconds, each.runs) for name, each in spent.items()})
        )

    async def changed(_: Request) -> Response:
        """Read keys that an operator has changed at another worker, before the operator hears of it.

        The next poll reads the fleet: rollout servers register often, and asking them all takes time.
        """
        try:
            await gateway.keys.refresh()
        except StorageUnavailable as error:
            logger.warning("changed keys are read at a later poll: %s", error)
        return Response()

    routes = {LIVE_PATH: live, METRICS_PATH: metrics, PARTS_PATH: parts, CHANGED_PATH: changed}
    return Starlette(
        routes=[
            *(Route(path, route, methods=["POST"]) for path, route in routes.items()),
            Route(HAVE_PATH, joinable.have, methods=["POST"]),
            Mount(JOIN_PATH.rstrip("/"), joinable.join),
        ]
    )


async def metrics_text(registry: CollectorRegistry, worker: Worker | None, siblings: Siblings) -> bytes:
    """The metrics of this process, or those of all workers."""
    if worker is None:
        return generate_latest(registry)
    answers = await siblings.ask(METRICS_PATH)
    others = {number: answers.get(number) for number in siblings.numbers}
    return merged({worker.number: exported(registry), **others})


async def parts_of_all(figures: Mapping[str, CallFigures], siblings: Siblings) -> dict[str, TimeSpent]:
    """The seconds and runs of each part of the calls, summed over the dialects and the workers."""
    sums = sums_of(figures)
    for answer in (await siblings.ask(PARTS_PATH)).values():
        for name, (seconds, runs) in _parts.decode(answer).items():
            spent = sums.setdefault(name, TimeSpent())
            spent.seconds += seconds
            spent.runs += runs
    return sums


def sums_of(figures: Mapping[str, CallFigures]) -> dict[str, TimeSpent]:
    """The seconds and runs of each part that ran, summed over the dialects."""
    sums: dict[str, TimeSpent] = {}
    for each in figures.values():
        for name, spent in each.parts.items():
            if spent.runs:
                total = sums.setdefault(name, TimeSpent())
                total.seconds += spent.seconds
                total.runs += spent.runs
    return sums
