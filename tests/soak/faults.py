"""Makes faults while the others serve: engines die, hang, and die of a request; a gateway stands still."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx
import psutil

from tests.soak.hostile import DEADLY, Hostile
from tests.soak.journal import Journal
from tests.soak.system import Engine, SoakSystem

PAUSE_S = (2.0, 6.0)
DOWN_S = (1.0, 4.0)
"""How long a dead engine is away."""
HANGS_S = (1.0, 8.0)
"""How long an engine is suspended. The gateway gives up an engine that is silent for 3 s, so it notices only
some of these pauses."""
STANDS_STILL_S = (11.0, 13.0)
"""How long a gateway is suspended: longer than it waits for Redis."""
BACK_WITHIN_S = 90.0
Fault = Callable[[SoakSystem, random.Random], Awaitable[None]]


async def make_faults(
    system: SoakSystem, draw: random.Random, journal: Journal, until: float, made: Counter[str]
) -> None:
    """Make one fault after the other until `until`, a time of `time.monotonic`, and count them in `made`.

    Each kind comes equally often. Deadly calls are among them.
    Returns when every engine serves again.
    """
    keeping = asyncio.create_task(_keep_alive(system, draw))
    kinds = list[str]()
    while time.monotonic() < until:
        await asyncio.sleep(draw.uniform(*PAUSE_S))  # faults come at any time
        kinds = kinds or draw.sample([*FAULTS, DEADLY], len(FAULTS) + 1)
        kind = kinds.pop()
        if kind == DEADLY:
            await Hostile(draw, journal).call(draw.choice(system.gateways), DEADLY)
        else:
            await FAULTS[kind](system, draw)
        made[kind] += 1
        if not await _back(system):
            journal.surprised(f"{BACK_WITHIN_S:g} s after a {kind}: {_told(system)}")
            break
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def _keep_alive(system: SoakSystem, draw: random.Random) -> None:
    """Start engines that died again, as a supervisor does."""
    while True:
        for engine in system.engines:
            if engine.dead:
                await asyncio.sleep(draw.uniform(*DOWN_S))  # a machine boots
                engine.start()
        await asyncio.sleep(0.2)  # engines die at any time


async def _kill(system: SoakSystem, draw: random.Random) -> None:
    draw.choice(system.engines).kill()


async def _hang(system: SoakSystem, draw: random.Random) -> None:
    await _suspend(draw.choice(system.engines), draw.uniform(*HANGS_S))


async def _stand_still(system: SoakSystem, draw: random.Random) -> None:
    """A gateway's machine stands still. All that happens to it meanwhile comes late, and nothing failed."""
    await _suspend(draw.choice(system.processes), draw.uniform(*STANDS_STILL_S))


async def _suspend(process: Engine | psutil.Process, seconds: float) -> None:
    process.suspend()
    try:
        await asyncio.sleep(seconds)  # it stays suspended
    finally:
        process.resume()


FAULTS: dict[str, Fault] = {"kill": _kill, "hang": _hang, "standstill": _stand_still}


async def _back(system: SoakSystem) -> bool:
    """Whether all gateways send calls to all engines again, in time."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < deadline:
        try:
            if await asyncio.to_thread(system.well):
                return True
        except httpx.HTTPError:
            pass  # asked again until the deadline
        await asyncio.sleep(0.3)  # gateways poll the engines
    return False


def _told(system: SoakSystem) -> str:
    states = [f"{each['id']} {each['state']}, breaker {each['breaker']}" for each in system.servers()]
    return "; ".join(states)
