"""What the worker processes of one gateway tell each other: metrics, slow parts, changes, calls in flight.

request ──▶ one worker ── asks ──▶ the other workers, over Unix sockets that only their user can reach
"""

import logging
from collections import Counter
from collections.abc import Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from gateway.counters import CallFigures, TimeSpent
from gateway.edge.joins import HAVE_PATH, JOIN_PATH, JoinableCalls
from gateway.parts import GatewayParts
from gateway.prometheus import Traffic
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.worker_processes import Siblings, Worker, exported, merged
from rollout_queue.protocol.gateway_messages import PlacementReport

logger = logging.getLogger(__name__)

LIVE_PATH, METRICS_PATH, PARTS_PATH, CHANGED_PATH = "/live", "/metrics", "/parts", "/changed"
TRAFFIC_PATH = "/traffic"
PLACED_PATH = "/placed"
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

    async def traffic(_: Request) -> Response:
        return Response(msgspec.json.encode(gateway.metrics.traffic))

    async def placed(_: Request) -> Response:
        return Response(placement_of(gateway).model_dump_json())

    async def changed(_: Request) -> Response:
        """Read keys that an operator has changed at another worker, before the operator gets the reply.

        The next poll reads the fleet: rollout servers register often, and asking them all takes time.
        """
        try:
            await gateway.keys.refresh()
        except StorageUnavailable as error:
            logger.warning("changed keys are read at a later poll: %s", error)
        return Response()

    routes = {LIVE_PATH: live, METRICS_PATH: metrics, PARTS_PATH: parts, PLACED_PATH: placed}
    routes |= {CHANGED_PATH: changed, TRAFFIC_PATH: traffic}
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


def placement_of(gateway: GatewayParts) -> PlacementReport:
    """Where this process sent its calls."""
    tokens, fleet = gateway.metrics.tokens, gateway.fleet
    return PlacementReport(
        placed=dict(fleet.rotation.placed),
        prompt_tokens=tokens.prompt,
        cached_tokens=tokens.cached,
        waiting=len(fleet.queue),
    )


async def placement_of_all(gateway: GatewayParts, siblings: Siblings) -> PlacementReport:
    """Where all workers sent their calls."""
    answers = (await siblings.ask(PLACED_PATH)).values()
    reports = [placement_of(gateway), *(PlacementReport.read(answer) for answer in answers)]
    placed: Counter[str] = Counter()
    for report in reports:
        placed.update(report.placed)
    return PlacementReport(
        placed=placed,
        prompt_tokens=sum(report.prompt_tokens for report in reports),
        cached_tokens=sum(report.cached_tokens for report in reports),
        waiting=sum(report.waiting for report in reports),
    )


async def parts_of_all(figures: Mapping[str, CallFigures], siblings: Siblings) -> dict[str, TimeSpent]:
    """The seconds and runs of each part of the calls, summed over the dialects and the workers."""
    sums = sums_of(figures)
    for answer in (await siblings.ask(PARTS_PATH)).values():
        for name, (seconds, runs) in _parts.decode(answer).items():
            spent = sums.setdefault(name, TimeSpent())
            spent.seconds += seconds
            spent.runs += runs
    return sums


async def traffic_of_all(own: Traffic, siblings: Siblings) -> Traffic:
    """What all workers have recorded."""
    answers = await siblings.ask(TRAFFIC_PATH)
    return sum((msgspec.json.decode(each, type=Traffic) for each in answers.values()), own)


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
