"""The calls of many sessions to a large fleet, simulated. The servers are chosen by the gateway's own code.

sessions ──turns──▶ one of the gateways ──Fleet.acquire──▶ simulated engine ──▶ figures

Real: `Fleet`, its polls, breakers and limits. Simulated: engines, sessions, Redis' answers, and time.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import thread_time_ns
from typing import Any, NamedTuple, cast

from bench.simulated_fleet.engines import EngineCall, EngineModel, Registry, SimulatedEngine, StatusOnly
from bench.simulated_fleet.virtual_time import virtual_clocks
from gateway.errors import NoServer
from gateway.fleet.call_queue import CallQueue
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer
from gateway.fleet.placement import Rotation, WantedServer
from gateway.policies.push_slots import LoadSlots
from gateway.settings import ConcurrencySettings

ATTEMPTS = 10
"""How often a call is tried."""
BACKOFF_S = 0.1


UNLIMITED = ConcurrencySettings(adaptive=False)


@dataclass(frozen=True)
class Traffic:
    """What is simulated. Sizes in tokens, means of random ones."""

    servers: int = 1000
    gateways: int = 10
    sessions: int = 100_000
    cycle_s: float = 10.0
    """How often a session calls: its answer and its pause take about this long."""
    turns: int = 8
    """Turns of a session. Then another one begins in its place."""
    first_prompt: int = 1200
    added: int = 250
    """What each turn adds to the prompt beside the answer."""
    output: int = 250
    most_output: int = 1024
    warm_s: float = 20.0
    """Not measured."""
    measured_s: float = 10.0
    poll_s: float = 0.5
    wait_s: float = 20.0
    engine: EngineModel = field(default_factory=EngineModel)
    concurrency: ConcurrencySettings = UNLIMITED


class Answered(NamedTuple):
    """What a call got: from which engine, with which version, how many tokens, and how many tokens of its
    prompt were in the cache."""

    engine: str
    version: int
    output: int
    cached: int


@dataclass
class CallsSeen:
    """What came of the calls."""

    turns: int = 0
    failed: int = 0
    """Calls without an answer."""
    retried: int = 0
    later_turns: int = 0
    """Turns with a prefix that some engine has sampled."""
    on_prefix: int = 0
    """Those of them whose engine had the whole prefix."""
    seconds: list[float] = field(default_factory=list)
    """From a call to its answer."""
    decisions_ns: list[int] = field(default_factory=list)
    """CPU time of each choice of a server."""
    refresh_ns: int = 0
    """CPU time of all polls."""
    running: list[Sequence[int]] = field(default_factory=list)
    """Calls of each engine, those in its queue too, at each second."""
    held: list[Sequence[int]] = field(default_factory=list)
    """Tokens of running calls in each engine's cache, at each second."""


class MeasuredRotation(Rotation):
    """Notes the CPU time of its choices."""

    seen: CallsSeen

    def choose(self, wanted: WantedServer) -> FleetServer | None:
        began = thread_time_ns()
        server = super().choose(wanted)
        self.seen.decisions_ns.append(thread_time_ns() - began)
        return server


class RandomRotation(MeasuredRotation):
    """Chooses any server in rotation."""

    draw = random.Random(0)

    def choose(self, wanted: WantedServer) -> FleetServer | None:
        able = [server for server in self.servers.values() if self.takes(server, wanted)]
        return self.draw.choice(able) if able else None


class LeastLoadedRotation(MeasuredRotation):
    """Chooses the server with the fewest calls, as far as this gateway knows."""

    def choose(self, wanted: WantedServer) -> FleetServer | None:
        able = [server for server in self.servers.values() if self.takes(server, wanted)]
        return min(able, key=lambda server: server.load, default=None)


class SimulatedGateway(Fleet):
    """The fleet as one gateway sees it."""

    def __init__(self, rotation: type[MeasuredRotation], run: "SimulatedTraffic") -> None:
        concurrency = run.traffic.concurrency
        super().__init__(cast(Any, run.registry), cast(Any, run.status), None, concurrency=concurrency)
        self.rotation = self.measured = rotation(self.servers)
        self.measured.seen = run.seen
        self.queue = CallQueue(self.rotation)


Event = tuple[float, Callable[["SimulatedTraffic"], Awaitable[None]]]
"""Seconds after the warm-up, and what happens then."""


class SimulatedTraffic:
    """One run."""

    def __init__(
        self,
        traffic: Traffic,
        rotation: type[MeasuredRotation] = MeasuredRotation,
        events: Sequence[Event] = (),
        seed: int = 0,
    ) -> None:
        self.traffic, self.draw = traffic, random.Random(seed)
        self._events = events
        self.engines: dict[str, SimulatedEngine] = {}
        self.registry = Registry()
        self.status = StatusOnly(self.engines)
        self.seen = CallsSeen()
        self._warm = False
        self.fleets: list[SimulatedGateway] = []
        self._rotation = rotation
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> CallsSeen:
        traffic, loop = self.traffic, asyncio.get_running_loop()
        self.join(traffic.servers)
        for _ in range(traffic.gateways):
            fleet = SimulatedGateway(self._rotation, self)
            self.fleets.append(fleet)
            await fleet.refresh()
            self.start(self._poll(fleet))
        for number in range(traffic.sessions):
            self.start(self._session(number))
        await asyncio.sleep(traffic.warm_s)
        self._begin_measuring()
        for at, event in self._events:
            loop.call_later(at, self._begin, event)
        for _ in range(int(traffic.measured_s)):
            await asyncio.sleep(1.0)
            self._sample()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.seen

    def _begin(self, event: Callable[["SimulatedTraffic"], Awaitable[None]]) -> None:
        self.start(event(self))

    def join(self, count: int) -> list[SimulatedEngine]:
        """Add servers, which register."""
        now, first = asyncio.get_running_loop().time(), len(self.engines)
        added = [SimulatedEngine(f"r{first + n:04}", self.traffic.engine) for n in range(count)]
        for engine in added:
            self.engines[engine.id] = engine
            self.registry.add(engine, now)
        return added

    def start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(self, prefix: str, prompt: int, last: str = "", version: int = 0) -> Answered:
        """One call; `last` is the engine of the turn before, and `version` that turn's. Raises NoServer."""
        loop, draw, avoid = asyncio.get_running_loop(), self.draw, ""
        fleet, wanted = draw.choice(self.fleets), WantedServer(prefix, cached_at=last, cached_version=version)
        output = min(self.traffic.most_output, 1 + int(draw.expovariate(1 / self.traffic.output)))
        began = loop.time()
        for attempt in range(ATTEMPTS):
            server = await fleet.acquire(wanted._replace(avoid=avoid), self.traffic.wait_s)
            engine, trial = self.engines[server.id], server.enter()
            cached = engine.caches(prefix)
            call = EngineCall(prefix, prompt, output, self.traffic.most_output, loop.create_future())
            try:
                if engine.state == "dead":
                    raise ConnectionRefusedError
                await engine.serve(call)
            except ConnectionError as error:
                server.breaker.failed(unreachable=isinstance(error, ConnectionRefusedError))
                avoid = server.id
                self.seen.retried += self._warm
                await asyncio.sleep(BACKOFF_S if attempt else 0)
                continue
            finally:
                server.leave(trial)
            if self._warm:
                self.seen.turns += 1
                self.seen.seconds.append(loop.time() - began)
            return Answered(server.id, engine.version, output, cached)
        raise NoServer("no attempt is left")

    async def _session(self, number: int) -> None:
        traffic, draw, life = self.traffic, self.draw, 0
        await asyncio.sleep(draw.uniform(0, traffic.cycle_s))
        turn = draw.randrange(traffic.turns)  # else all would begin at once
        prompt, known = traffic.first_prompt + turn * (traffic.added + traffic.output), 0
        last = Answered("", 0, 0, 0)
        while True:
            try:
                last = await self.call(f"{number}-{life}", prompt, last.engine, last.version)
            except NoServer:
                self.seen.failed += self._warm
                last = Answered("", 0, 0, 0)
            if self._warm and known:
                self.seen.later_turns += 1
                self.seen.on_prefix += last.cached >= known
            known = prompt + last.output
            prompt, turn = known + traffic.added, turn + 1
            if turn >= traffic.turns:
                life, turn, known, prompt = life + 1, 0, 0, traffic.first_prompt
                last = Answered("", 0, 0, 0)
            await asyncio.sleep(draw.expovariate(2 / traffic.cycle_s))

    async def _poll(self, fleet: Fleet) -> None:
        await asyncio.sleep(self.draw.uniform(0, self.traffic.poll_s))
        while True:
            began = thread_time_ns()
            await fleet.refresh()
            self.seen.refresh_ns += thread_time_ns() - began
            await asyncio.sleep(self.traffic.poll_s)

    def _begin_measuring(self) -> None:
        self._warm = True
        self.seen = CallsSeen()
        self.status.polls = 0
        self.registry.operations = 0
        self.registry.bytes_read = 0
        for engine in self.engines.values():
            engine.seen = type(engine.seen)()
        for fleet in self.fleets:
            fleet.measured.seen = self.seen

    def _sample(self) -> None:
        alive = [engine for engine in self.engines.values() if engine.state != "dead"]
        self.seen.running.append([len(engine.running) + len(engine.waiting) for engine in alive])
        self.seen.held.append([engine.held for engine in alive])


def simulated_calls(
    traffic: Traffic, rotation: type[MeasuredRotation] = MeasuredRotation, events: Sequence[Event] = ()
) -> SimulatedTraffic:
    """A run that has ended."""
    with virtual_clocks() as loop:
        run = SimulatedTraffic(traffic, rotation, events)
        loop.run_until_complete(run.run())
    return run


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
