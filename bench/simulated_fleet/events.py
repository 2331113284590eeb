"""What happens to a large fleet under load: a push, deaths, joins, a session with many forks."""

import asyncio
from collections.abc import Mapping, Sequence

from bench.simulated_fleet.calls import Event, SimulatedTraffic
from gateway.errors import NoServer
from gateway.policies.push_slots import LoadSlots

LOAD_S = 3.0
UNAVAILABLE = 0.25
FORKS = 1000
AT_S = 2.0


async def pushed(run: SimulatedTraffic) -> None:
    """Every server loads another version, a quarter of them at once."""
    slots = LoadSlots(UNAVAILABLE, lambda: len(run.engines))

    async def load(engine_id: str) -> None:
        async with slots.taken():
            engine = run.engines[engine_id]
            run.registry.loading.add(engine_id.encode())
            engine.state = "loading"
            await asyncio.sleep(LOAD_S)
            engine.load(engine.version + 1)
            run.registry.loading.discard(engine_id.encode())

    run.registry.serve(2, 1)
    await asyncio.gather(*map(load, list(run.engines)))


async def died(run: SimulatedTraffic) -> None:
    """A tenth of the servers dies at once."""
    for engine in run.draw.sample(list(run.engines.values()), max(1, len(run.engines) // 10)):
        engine.die()


async def joined(run: SimulatedTraffic) -> None:
    """A tenth more servers join at once."""
    run.join(max(1, len(run.engines) // 10))


async def forked(run: SimulatedTraffic) -> None:
    """One session makes many calls at once, all with the same prefix."""
    first = await run.call("hot", 4000)

    async def fork() -> None:
        try:
            await run.call("hot", 4000 + first.output, first.engine, first.version)
        except NoServer:
            run.seen.failed += 1

    await asyncio.gather(*(fork() for _ in range(FORKS)))


EVENTS: Mapping[str, Sequence[Event]] = {
    "none": (),
    "a push": ((AT_S, pushed),),
    "a tenth dies": ((AT_S, died),),
    "a tenth joins": ((AT_S, joined),),
    f"{FORKS:,} forks of a session": ((AT_S, forked),),
}
