"""A push to a large fleet, simulated: how long it takes, what the trainer sends, how much capacity is lost.

python -m bench.fleet push

Simulated: the links, the loads, the deaths, and the time, which passes at once. Real: the order of the push,
which is the gateway's own (`gateway/policies/push_slots.py`). The readers of a source share its link. A
server that dies comes back after its boot, and fetches again; its readers turn to the trainer.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from bench.simulated_fleet.virtual_time import VirtualTime
from gateway.policies.push_slots import FetchSources, LoadSlots

GB, GBIT = 1e9, 1e9 / 8


@dataclass(frozen=True)
class PushedFleet:
    """What is simulated. Links in bytes a second, each in both directions."""

    servers: int = 1000
    weights: float = 15 * GB
    trainer_link: float = 25 * GBIT
    server_link: float = 10 * GBIT
    slow_every: int = 50
    """One in so many servers has a tenth of the link."""
    load: float = 5 * GB
    """Bytes a second from the disk into the engine; it stands still meanwhile."""
    deaths: int = 5
    """So many servers die in the first half of a push, at random times."""
    boot_s: float = 120.0
    max_unavailable: float = 0.25
    fan_out: int = 4
    changes: float = 1.0
    """The share of the bytes that is sent: less than 1 for changes against the version before."""


@dataclass
class Seen:
    """What a push has come to."""

    served_at: list[float] = field(default_factory=list)
    from_trainer: float = 0.0
    """Bytes."""
    paused_s: float = 0.0
    """Summed over the servers."""
    most_paused: int = 0
    """At once."""


class Link:
    """A link whose readers share it evenly."""

    def __init__(self, capacity: float) -> None:
        """`capacity` in bytes a second."""
        self._capacity = capacity
        self._readers = 0
        self._changed = asyncio.Event()

    async def read(self, size: float, limit: float) -> None:
        """Returns once `size` bytes have passed, at most `limit` a second."""
        clock = asyncio.get_running_loop().time
        self._change(1)
        try:
            while size > 1.0:  # less than a byte is a rounding
                rate, since, changed = min(self._capacity / self._readers, limit), clock(), self._changed
                with suppress(TimeoutError):
                    async with asyncio.timeout(size / rate):
                        await changed.wait()
                size -= rate * (clock() - since)
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        self._readers += by
        self._changed.set()
        self._changed = asyncio.Event()


class Push:
    """One push to the whole fleet."""

    def __init__(self, fleet: PushedFleet, seed: int = 0) -> None:
        self._fleet, self._draw = fleet, random.Random(seed)
        self._sources = FetchSources(fleet.fan_out)
        self._slots = LoadSlots(fleet.max_unavailable, lambda: fleet.servers)
        self._trainer = Link(fleet.trainer_link)
        self._links = [Link(self._speed(number)) for number in range(fleet.servers)]
        self._having: list[str] = []
        self._dead: set[str] = set()
        self._readers: dict[str, set[asyncio.Task[None]]] = {}
        self._paused = 0
        self.seen = Seen()

    async def run(self) -> Seen:
        tasks = {f"s{n}": asyncio.create_task(self._server(n)) for n in range(self._fleet.servers)}
        killing = asyncio.create_task(self._kill(tasks))
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await killing
        revived = [asyncio.create_task(self._server(int(name[1:]))) for name in sorted(self._dead)]
        await asyncio.gather(*revived)
        return self.seen

    async def _kill(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        whole_s = self._fleet.weights * self._fleet.changes / self._fleet.server_link
        for name in self._draw.sample(sorted(tasks), self._fleet.deaths):
            await asyncio.sleep(self._draw.uniform(0, whole_s))
            if tasks[name].cancel():
                self._dead.add(name)
                with suppress(ValueError):
                    self._having.remove(name)
                for reader in self._readers.pop(name, set()):
                    reader.cancel()

    def _speed(self, number: int) -> float:
        slow = number % self._fleet.slow_every == self._fleet.slow_every - 1
        return self._fleet.server_link / (10 if slow else 1)

    async def _server(self, number: int) -> None:
        name, fleet = f"s{number}", self._fleet
        if name in self._dead:
            await asyncio.sleep(fleet.boot_s)
        async with self._sources.taken(lambda: self._having, any_readers=False) as peer:
            await self._fetch(number, peer)
            self._having.append(name)
        async with self._slots.taken():
            self._paused += 1
            self.seen.most_paused = max(self.seen.most_paused, self._paused)
            try:
                await asyncio.sleep(fleet.weights / fleet.load)
            finally:
                self._paused -= 1
        self.seen.paused_s += fleet.weights / fleet.load
        self.seen.served_at.append(asyncio.get_running_loop().time())

    async def _fetch(self, number: int, peer: str | None) -> None:
        whole = self._fleet.weights * self._fleet.changes
        if peer is not None and self._fleet.changes == 1.0:
            link = self._links[int(peer[1:])]
            reading = asyncio.create_task(link.read(whole, self._speed(number)))
            self._readers.setdefault(peer, set()).add(reading)
            await asyncio.wait([reading])
            if not reading.cancelled():
                return
        await self._trainer.read(whole, self._speed(number))
        self.seen.from_trainer += whole


def simulated(fleet: PushedFleet) -> Seen:
    loop = VirtualTime()
    try:
        return loop.run_until_complete(Push(fleet).run())
    finally:
        loop.close()


def row(title: str, fleet: PushedFleet) -> Sequence[str]:
    seen = simulated(fleet)
    served = sorted(seen.served_at)
    if len(served) < fleet.servers:
        raise RuntimeError(f"{fleet.servers - len(served)} servers do not serve the version")
    at = [served[int(share * len(served)) - 1] for share in (0.5, 0.99, 1.0)]
    lost = seen.paused_s / (fleet.servers * at[-1])
    return (
        title,
        *(f"{each:,.0f}" for each in at),
        f"{seen.from_trainer / GB:,.0f}",
        f"{100 * seen.most_paused / fleet.servers:.0f} %",
        f"{100 * lost:.1f} %",
    )


COLUMNS = (
    "",
    "half of the fleet, s",
    "99 %, s",
    "all, s",
    "from the trainer, GB",
    "most paused at once",
    "capacity lost",
)


def main() -> None:
    fleet = PushedFleet()
    rows = [
        row("trainer only", replace(fleet, fan_out=fleet.servers)),
        *(row(f"fan-out {fan_out}", replace(fleet, fan_out=fan_out)) for fan_out in (1, 2, 4, 8)),
        row("trainer only, changes of 1.3 %", replace(fleet, fan_out=fleet.servers, changes=0.013)),
        row("fan-out 4, changes of 1.3 %", replace(fleet, changes=0.013)),
        row("10 servers, trainer only", replace(fleet, servers=10, deaths=0, fan_out=10)),
        row("10 servers, fan-out 4", replace(fleet, servers=10, deaths=0)),
    ]
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print(f"| {' | '.join(cells)} |")
