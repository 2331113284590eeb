"""Everything that a request may need, built once when the application starts and handed to every route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from gateway.admission.admission import Admission
    from gateway.edge.retries import Flights
    from gateway.engines.engine import EngineClient
    from gateway.engines.failover import Sampler
    from gateway.engines.fleet import Fleet
    from gateway.engines.policies import Policies
    from gateway.generations.generator import Generator
    from gateway.generations.recorder import Recorder
    from gateway.language.render import ChatRenderer
    from gateway.metrics import Metrics
    from gateway.operators.pipeline import Pipeline
    from gateway.operators.watch import Watch
    from gateway.sessions.belonging import Belonging
    from gateway.sessions.identity import Identities
    from gateway.sessions.retention import Retention
    from gateway.sessions.sessions import Sessions
    from gateway.settings import GatewaySettings
    from rollout_queue.contract.stream import StreamDeleter, StreamWriter


@dataclass(frozen=True)
class Collaborators:
    """The gateway's parts, open for as long as the application runs."""

    settings: GatewaySettings
    identities: Identities
    renderer: ChatRenderer
    redis: Redis
    writer: StreamWriter
    deleter: StreamDeleter
    engine: EngineClient
    fleet: Fleet
    policies: Policies
    admission: Admission
    sessions: Sessions
    belonging: Belonging
    sampler: Sampler
    generator: Generator
    recorder: Recorder
    flights: Flights
    metrics: Metrics
    pipeline: Pipeline
    watch: Watch
    retention: Retention


def collaborators(request: Request) -> Collaborators:
    found: Collaborators = request.app.state.collaborators
    return found
