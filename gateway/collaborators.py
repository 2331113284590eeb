"""Everything that a request may need, built once at the door and handed to every route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from gateway.belonging import Belonging
    from gateway.engine import EngineClient
    from gateway.fleet import Fleet
    from gateway.generation import Generator
    from gateway.identity import Identities
    from gateway.metrics import Metrics
    from gateway.policies import Policies
    from gateway.render import ChatRenderer
    from gateway.sessions import Sessions
    from gateway.settings import GatewaySettings
    from rollout_queue.stream import StreamWriter


@dataclass(frozen=True)
class Collaborators:
    """The gateway's parts, open for as long as the application runs."""

    settings: GatewaySettings
    identities: Identities
    renderer: ChatRenderer
    redis: Redis
    writer: StreamWriter
    engine: EngineClient
    fleet: Fleet
    policies: Policies
    sessions: Sessions
    belonging: Belonging
    generator: Generator
    metrics: Metrics


def collaborators(request: Request) -> Collaborators:
    found: Collaborators = request.app.state.collaborators
    return found
