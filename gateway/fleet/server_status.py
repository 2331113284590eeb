"""Asks the servers of the fleet for their status: which are asked at a poll, and whether two share an id.

A server whose state may change soon is asked at every poll: one that is not ready, whose calls fail, or that
some gateway has load a version. The others are asked in turn, so that a gateway asks few a second however
large the fleet is.

A registration under a known id or URL comes from a server that started again, or from a second server. It is
a second server if the process that registered first still answers there, or registers once more.
"""

import asyncio
import heapq
from collections.abc import Iterable, Mapping

import aiohttp
import msgspec

from gateway.errors import StateConflict
from gateway.fleet.engine_client import EngineClient
from gateway.fleet.event_stream import version_number
from gateway.fleet.fleet_server import EngineLoad, FleetServer, ModelInfo, Registration
from rollout_queue import clock
from rollout_queue.foreign_json import read_json
from rollout_queue.protocol.gateway_messages import ServerStatus
from rollout_queue.protocol.rollout_server_messages import EngineLoads

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


STATUS_PER_S = 200.0
"""How many servers in a steady state a gateway process asks a second, at most."""
LONGEST_S = 5.0
"""So many seconds of these requests are made up for, after a pause."""


class StatusSchedule:
    """Notes when each server was asked."""

    def __init__(self) -> None:
        self._at = float("-inf")

    def due(self, servers: Iterable[FleetServer], now: float) -> list[FleetServer]:
        """The servers to ask at `now`, by clock.monotonic()."""
        budget = int(STATUS_PER_S * min(now - self._at, LONGEST_S))
        self._at = now
        due: list[FleetServer] = []
        steady: list[FleetServer] = []
        for server in servers:
            (steady if server.steady else due).append(server)
        due += heapq.nsmallest(budget, steady, key=lambda server: server.asked_at)
        for server in due:
            server.asked_at = now
        return due


DISPLACED_MAX = 16
"""How many former processes of a server are remembered."""
STATUS_TIMEOUT_S = 5.0


async def status_of(
    registration: Registration, engine: EngineClient, headers: Mapping[str, str]
) -> ServerStatus:
    """The status that a rollout server gives of itself.

    Raises aiohttp.ClientError, TimeoutError, and ValueError if another process answers in its place.
    """
    status = ServerStatus.read(await engine.get(f"{registration.url}/status", STATUS_TIMEOUT_S, headers))
    if registration.process is not None and status.process != registration.process:
        raise ValueError(f"another process answers at {registration.url}, with the id {status.id}")
    return status


async def distinct(
    registration: Registration,
    known: Iterable[Registration],
    engine: EngineClient,
    headers: Mapping[str, str],
) -> tuple[Registration, list[str]]:
    """The registration as it is to be stored, and the ids of the servers whose places it takes.

    Raises StateConflict for a second server.
    """
    rivals = [each for each in known if _shares(registration, each)]
    for rival in rivals:
        if registration.process is not None and registration.process in rival.displaced:
            raise _conflict(registration, rival)
    others = [each for each in rivals if each.process not in (None, registration.process)]
    answering = await asyncio.gather(*(_still_answers(each, engine, headers) for each in others))
    for rival, answers in zip(others, answering, strict=True):
        if answers:
            raise _conflict(registration, rival)
    displaced = [name for each in rivals for name in each.displaced]
    displaced += [each.process for each in others if each.process is not None]
    taken = [each.id for each in others if each.id != registration.id]
    return msgspec.structs.replace(registration, displaced=tuple(displaced[-DISPLACED_MAX:])), taken


def _shares(one: Registration, other: Registration) -> bool:
    """Whether both have the same id or URL. If either names no `process`, only the ids are compared."""
    if one.id == other.id:
        return True
    both = one.process is not None and other.process is not None
    return both and (one.url == other.url or one.engine_url == other.engine_url)


async def _still_answers(rival: Registration, engine: EngineClient, headers: Mapping[str, str]) -> bool:
    try:
        await status_of(rival, engine, headers)
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
        return False
    return True


def _conflict(registration: Registration, rival: Registration) -> StateConflict:
    if registration.id == rival.id:
        shared, param = f"the id {rival.id}", "id"
    elif registration.url == rival.url:
        shared, param = f"the URL {rival.url}", "url"
    else:
        shared, param = f"the engine's URL {rival.engine_url}", "engine_url"
    return StateConflict(
        f"two rollout servers have {shared}: the other one is {rival.id} at {rival.url}. Give each its own "
        "rollout_server.id, public_url and engine_public_url, or leave them unset",
        param=param,
    )
