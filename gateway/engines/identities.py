"""Finds out whether two rollout servers share an id or a URL, so that no server takes another's place.

A registration under a known id or URL comes from a server that started again, or from a second server. It is
a second server if the process that registered first still answers there, or registers once more.
"""

import asyncio
from collections.abc import Iterable, Mapping

import aiohttp
import msgspec

from gateway.engines.client import EngineClient
from gateway.engines.fleet_server import Registration
from gateway.errors import StateConflict
from rollout_queue.protocol.status import ServerStatus

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
