"""Asks one server of the fleet for its state and version."""

from collections.abc import Mapping

import aiohttp
import msgspec

from gateway.engines.client import EngineClient
from gateway.engines.event_stream import version_number
from gateway.engines.fleet_server import FleetServer, ModelInfo
from gateway.engines.identities import STATUS_TIMEOUT_S, status_of
from gateway.engines.placement.concurrency import EngineLoad
from rollout_queue import clock
from rollout_queue.foreign_json import read_json
from rollout_queue.protocol.engine_load import EngineLoads

LATE_ANSWERS = 2
"""Consecutive timeouts after which a server counts as dead. A single one may come from a busy machine."""


async def read_status(server: FleetServer, engine: EngineClient, headers: Mapping[str, str]) -> None:
    """Update the server's state and version.

    An engine's /health is no use: it samples, and fails while the engine is paused.
    """
    registration, was_ready, reloads = server.registration, server.state == "ready", server.reloads
    load: EngineLoad | None = None
    try:
        if registration.url is None:
            body = await engine.get(f"{registration.engine_url}/model_info", STATUS_TIMEOUT_S)
            info = read_json(body, ModelInfo)
            server.state, server.version = "ready", version_number(info.weight_version)
            load = await _load_of(registration.engine_url, engine)
        else:
            status = await status_of(registration, engine, headers)
            load = EngineLoad(status.running, status.waiting, status.kv_usage)
            if reloads == server.reloads:  # else the server has loaded another version since
                server.state = status.state
                server.serves_now(status.version, status.manifest_sha256, status.adapters, status.push)
        server.seen_at, server.error, server.late = clock.now(), None, 0
        server.reports(load)
    except TimeoutError:
        server.late += 1
        server.error = f"no answer in {STATUS_TIMEOUT_S:g} s, {server.late} times in a row"
        if server.late >= LATE_ANSWERS:
            server.state = "dead"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        server.state, server.error, server.late = "dead", f"{type(error).__name__}: {error}", 0
    if server.state == "dead" and not server.late:
        server.give_up(f"the server is dead: {server.error or 'its status says so'}")
    if server.state == "ready" and not was_ready:
        server.breaker.try_soon()


async def _load_of(engine_url: str, engine: EngineClient) -> EngineLoad | None:
    """The load of a bare engine; None if it does not know the route, or is too old for it."""
    try:
        body = await engine.get(f"{engine_url}/v1/loads", STATUS_TIMEOUT_S)
        loads = read_json(body, EngineLoads, strict=False)
    except (aiohttp.ClientResponseError, msgspec.DecodeError):
        return None
    return EngineLoad(loads.running, loads.waiting, loads.kv_usage)
