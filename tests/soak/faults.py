"""Kills and suspends one engine after the other, while the others serve."""

import asyncio
import random
import time
from collections import Counter

import httpx

from tests.soak.journal import Journal
from tests.soak.system import Engine, SoakSystem

PAUSE_S = (2.0, 6.0)
DOWN_S = (1.0, 4.0)
"""How long a killed engine is away."""
HANGS_S = (1.0, 8.0)
"""How long an engine is suspended. The gateway gives up an engine that is silent for 3 s, so it notices only
some of these pauses."""
BACK_WITHIN_S = 90.0


async def make_faults(
    system: SoakSystem, draw: random.Random, journal: Journal, until: float, made: Counter[str]
) -> None:
    """Kill or suspend engines until `until`, a time of `time.monotonic`, and count the faults in `made`.

    Returns when every engine serves again.
    """
    while time.monotonic() < until:
        await asyncio.sleep(draw.uniform(*PAUSE_S))  # faults come at any time
        engine = draw.choice(system.engines)
        kind = draw.choice(("kill", "hang"))
        await (_kill if kind == "kill" else _hang)(engine, draw)
        made[kind] += 1
        if not await _back(system):
            journal.surprised(f"{BACK_WITHIN_S:g} s after a {kind} of {engine.url}: {_told(system)}")
            return


async def _kill(engine: Engine, draw: random.Random) -> None:
    engine.kill()
    await asyncio.sleep(draw.uniform(*DOWN_S))  # until a supervisor starts it again
    engine.start()


async def _hang(engine: Engine, draw: random.Random) -> None:
    engine.suspend()
    try:
        await asyncio.sleep(draw.uniform(*HANGS_S))  # the engine stays suspended
    finally:
        engine.resume()


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
