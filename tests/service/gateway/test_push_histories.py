"""The driver of pushes over drawn histories: publications, rollbacks, and servers that die, refuse or hang.

Two gateways share one Redis; one of them drives at a time. The servers are objects in this process. After
each event, what must always hold is checked; at the end all servers are well again, and the fleet must
settle.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer, Registration
from gateway.fleet.registrations import write_registration
from gateway.policies.push import PushBounds, PushDriver
from rollout_queue import clock
from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.contract.serving_plan import ServingPlan
from rollout_queue.protocol.message import ServiceMessage
from rollout_queue.protocol.rollout_server_messages import ReloadBody
from rollout_queue.redis import key_names
from rollout_queue.redis.plan_store import ServingRegister
from rollout_queue.redis.policy_register import PolicyRegister
from tests.support.gateway.running import Backends
from tests.support.hypothesis_profiles import examples
from tests.support.redis_clients import async_redis_at
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S

SERVERS = 4
BOUNDS = PushBounds(timeout_s=5, lease_s=60, max_unavailable=0.5, fetch_fan_out=2, max_version_lag=1)
MOST_LOADING = 2
MODES = ("well", "refuses", "fails", "hangs")
EVENTS = st.one_of(
    st.tuples(st.just("publish")),
    st.tuples(st.just("roll back"), st.integers(0, 9)),
    st.tuples(st.just("mode"), st.integers(0, SERVERS - 1), st.sampled_from(MODES)),
    st.tuples(st.just("mode of all"), st.sampled_from(MODES)),
    st.tuples(st.just("die"), st.integers(0, SERVERS - 1)),
    st.tuples(st.just("start"), st.integers(0, SERVERS - 1)),
    st.tuples(st.just("drain"), st.integers(0, SERVERS - 1)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("time"), st.sampled_from([0.6, 3.0, 70.0])),
    st.tuples(st.just("takeover")),
)


def manifest(version: int) -> str:
    return hashlib.sha256(b"%d" % version).hexdigest()


@dataclass
class Server:
    """One rollout server with its engine."""

    id: str
    version: int = 0
    push: int = 0
    process: int = 0
    state: str = "ready"
    drained: bool = False
    mode: str = "well"

    @property
    def url(self) -> str:
        return f"http://{self.id}"


@dataclass
class World:
    servers: list[Server]
    loaded: set[int] = field(default_factory=set)
    """The versions that some server has loaded."""
    refused: set[tuple[str, int, int, int]] = field(default_factory=set)
    """Server, its process, push, and the driver's number: it must not be asked again."""
    wrong: list[str] = field(default_factory=list)
    """Requests that must not have come. The driver's tasks would only log an exception."""


@dataclass
class Requests:
    """What one gateway sends to the servers, in place of `EngineClient`."""

    world: World
    term: int = 0
    """How often driving has moved to another gateway."""
    loading: Counter[str] = field(default_factory=Counter)
    prepared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By server, the push and the driver's number of what it has prepared last. Its process may end then."""

    async def get(self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> bytes:
        raise TimeoutError  # the states of servers are the property's own

    async def post(
        self, url: str, message: ServiceMessage, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        assert isinstance(message, ReloadBody)
        server = next(each for each in self.world.servers if url == f"{each.url}/reload")
        key = (server.id, server.process, message.push or 0, self.term)
        if key in self.world.refused:
            self.world.wrong.append(f"{key} has refused this order")
        if not message.prepare:
            self.loading[server.id] += 1
            if key[2:] != self.prepared.get(server.id):
                self.world.wrong.append(f"{key} has not prepared version {message.version}")
            if self.loading.total() > MOST_LOADING:
                self.world.wrong.append(f"{self.loading} load at once")
        try:
            return await self._reload(server, message, key)
        finally:
            if not message.prepare:
                self.loading[server.id] -= 1

    async def _reload(
        self, server: Server, asked: ReloadBody, key: tuple[str, int, int, int]
    ) -> tuple[int, bytes]:
        process, mode = server.process, server.mode
        await asyncio.sleep(0.001)  # a server works for a moment
        if server.state == "dead" or server.process != process:
            raise OSError("connection refused")
        if mode == "hangs":
            raise TimeoutError
        if mode == "fails":
            return 500, json.dumps({"error": {"message": "the disk is full"}}).encode()
        if mode == "refuses":
            self.world.refused.add(key)
            return 422, json.dumps({"error": {"message": "a tensor is missing"}}).encode()
        if asked.prepare:
            self.prepared[server.id] = key[2:]
            return 200, json.dumps(
                {"ok": True, "version": server.version, "prepared": asked.version}
            ).encode()
        server.version, server.push = asked.version, asked.push or 0
        self.world.loaded.add(asked.version)
        return 200, json.dumps({"ok": True, "version": server.version, "paused_s": 0.01}).encode()

    async def request(
        self, method: str, url: str, timeout_s: float, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        server = next(each for each in self.world.servers if url.startswith(f"{each.url}/reload/"))
        if server.state == "dead":
            raise OSError("connection refused")
        return 200, json.dumps({"version": server.version, "aborted": True}).encode()


@dataclass
class Gateway:
    world: World
    redis: Redis
    requests: Requests
    fleet: Fleet
    driver: PushDriver

    @classmethod
    def of(cls, world: World, url: str) -> "Gateway":
        redis, requests = async_redis_at(url), Requests(world)
        engine: Any = requests
        fleet = Fleet(redis, engine, None)
        return cls(world, redis, requests, fleet, PushDriver(redis, fleet, BOUNDS))

    def look(self) -> None:
        """Read the status of every server, as a poll does."""
        for server in self.world.servers:
            registration = Registration(
                id=server.id, url=server.url, engine_url=server.url, process=str(server.process)
            )
            seen = self.fleet.servers.setdefault(server.id, FleetServer(registration, freed=lambda _: None))
            seen.registration = registration
            seen.state, seen.drained = server.state, server.drained
            if not seen.pushing:
                sha256 = manifest(server.version) if server.version else None
                seen.serves_now(server.version, sha256, (), server.push)

    async def step(self, times: int) -> None:
        for _ in range(times):
            self.look()
            await self.driver.step()
            await asyncio.sleep(0.003)  # the servers' work goes on between two steps

    async def close(self) -> None:
        await self.driver.close()
        await self.redis.aclose()


class History:
    """Carries out the events, and checks after each."""

    def __init__(self, gateways: list[Gateway], world: World, turned: TurnedClock) -> None:
        self.gateways, self.world, self.turned = gateways, world, turned
        self.redis = gateways[0].redis
        self.register, self.serving = PolicyRegister(self.redis), ServingRegister(self.redis)
        self.versions = [0]
        self.ended: dict[int, str] = {}
        self.newest_push = 0
        self.died_in = 0
        """The push during which a server last died or started: then what it had proved is no longer noted."""

    @property
    def driving(self) -> Gateway:
        return self.gateways[0]

    async def begin(self) -> None:
        await self.register.register_first(PolicyRecord(version=0, created_at=clock.now(), state="serving"))
        await self.serving.change(lambda plan: plan.begun(0, clock.now(), force=False))
        async with asyncio.timeout(PATIENCE_S):
            while (await self.serving.read()).serving != 0:
                await self.driving.step(1)

    async def event(self, name: str, *given: Any) -> None:
        match name:
            case "publish":
                await self.publish()
            case "roll back":
                known = sorted(await self.register.records())
                to = known[given[0] % len(known)]
                await self.serving.change(lambda plan: plan.begun(to, clock.now(), force=True))
            case "mode":
                self.world.servers[given[0]].mode = given[1]
            case "mode of all":
                for server in self.world.servers:
                    server.mode = given[0]
            case "die":
                self.world.servers[given[0]].state = "dead"
                self.died_in = self.newest_push
            case "start":
                self.start(self.world.servers[given[0]])
            case "drain":
                self.world.servers[given[0]].drained ^= True
            case "step":
                await self.driving.step(given[0])
            case "time":
                self.turned.turn(given[0])
                await self.driving.step(1)
            case "takeover":
                await self.redis.delete(key_names.PUSH_LEASE)
                self.gateways.reverse()
                self.driving.requests.term = self.gateways[1].requests.term + 1
                await self.driving.step(1)
                await self.gateways[1].step(1)
        await self.check()

    def start(self, server: Server) -> None:
        """Its process starts again, with the version of the base model."""
        self.died_in = self.newest_push
        server.process += 1
        server.state, server.version, server.push = "ready", 0, 0

    async def publish(self) -> None:
        version = (await self.register.look()).next_free
        record = PolicyRecord(
            version=version,
            location=f"file:///{version}",
            manifest_sha256=manifest(version),
            created_at=clock.now(),
        )
        assert await self.register.register(record, await self.register.look())
        await self.serving.change(lambda plan: plan.begun(version, clock.now(), force=False))

    async def check(self) -> None:
        assert not self.world.wrong
        plan = await self.serving.read()
        assert plan.push is not None
        assert plan.push.id >= self.newest_push, "a push replaces older ones"
        self.newest_push = plan.push.id
        assert plan.versions <= self.world.loaded | {0}, "no version answers calls that no server has loaded"
        assert plan.serving is not None
        assert len(plan.admissible) <= BOUNDS.max_version_lag + 1
        for push in (plan.push, *await self.serving.last_pushes()):
            if push.state != "pushing":
                assert self.ended.setdefault(push.id, push.state) == push.state, "it ends once"
            if push.state == "serving":
                assert push.version in self.world.loaded | {0}
        noted = await self.serving.server_pushes(plan.push.id)
        if plan.push.state == "serving" and plan.push.id > self.died_in:
            assert any(each.state == "proved" for each in noted.values())
        if plan.push.state == "failed":
            assert plan.push.error
            assert not any(each.state == "proved" for each in noted.values())
            assert any(each.state in ("refused", "failed") for each in noted.values())

    async def settle(self) -> ServingPlan:
        """All servers are well again."""
        for server in self.world.servers:
            server.mode, server.drained = "well", False
            if server.state == "dead":
                self.start(server)
        for _ in range(40):
            await self.driving.step(2)
            plan = await self.serving.read()
            if not plan.pushing and all(self.is_settled(server, plan) for server in self.world.servers):
                break
            self.turned.turn(70.0)
        return plan

    def is_settled(self, server: Server, plan: ServingPlan) -> bool:
        push = plan.push.id if plan.push is not None else 0
        refused = (server.id, server.process, push, self.driving.requests.term) in self.world.refused
        return server.version == plan.target or refused


async def history(url: str, events: list[tuple[Any, ...]], turned: TurnedClock) -> None:
    world = World([Server(f"r{number}") for number in range(SERVERS)])
    gateways = [Gateway.of(world, url) for _ in range(2)]
    for server in world.servers:
        await write_registration(
            gateways[0].redis, Registration(id=server.id, url=server.url, engine_url=server.url)
        )
    told = History(gateways, world, turned)
    try:
        await told.begin()
        for event in events:
            await told.event(*event)
        plan = await told.settle()
        await told.check()
        assert not plan.pushing
        assert [server.version for server in world.servers if not told.is_settled(server, plan)] == []
        assert plan.serving == plan.target
        assert not any(server.pushing for server in told.driving.fleet.rollout_servers)
    finally:
        for gateway in gateways:
            await gateway.close()


@settings(max_examples=examples(100))
@example(events=[("mode of all", "refuses"), ("publish",), ("step", 4), ("step", 4)])
@example(
    events=[("mode", 0, "fails"), ("publish",), ("step", 3), ("time", 3.0), ("time", 3.0), ("time", 3.0)]
)
@example(events=[("mode", 0, "refuses"), ("publish",), ("step", 4), ("time", 3.0), ("time", 70.0)])
@example(events=[*(("die", number) for number in range(SERVERS)), ("publish",), ("step", 2)])
@example(events=[("publish",), ("step", 1), ("takeover",), ("step", 3)])
@example(events=[("publish",), ("step", 1), ("die", 1), ("step", 3), ("start", 1), ("step", 3)])
@example(events=[("publish",), ("step", 1), ("roll back", 0), ("step", 3)])
@given(events=st.lists(EVENTS, max_size=14))
def test_a_push_ends_once_and_every_server_serves_its_version_whatever_happens(
    own_backends: Backends, events: list[tuple[Any, ...]]
) -> None:
    own_backends.clear(None)
    turned = TurnedClock()
    with clock.using(turned):
        asyncio.run(history(own_backends.redis_url, events, turned))


async def test_a_version_that_redis_has_lost_is_registered_again_even_if_the_plan_changes_meanwhile(
    own_backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_backends.clear(None)
    world = World([Server("r0")])
    gateways = [Gateway.of(world, own_backends.redis_url)]
    history, again, tries = History(gateways, world, TurnedClock()), PolicyRegister.register_again, [0]
    await write_registration(
        gateways[0].redis, Registration(id="r0", url="http://r0", engine_url="http://r0")
    )
    await history.begin()
    await history.publish()
    await gateways[0].step(3)

    async def late(register: PolicyRegister, record: PolicyRecord, plan: bytes) -> bool:
        tries[0] += 1
        return tries[0] > 1 and await again(register, record, plan)

    monkeypatch.setattr(PolicyRegister, "register_again", late)
    await gateways[0].redis.hdel(key_names.POLICIES, "1")
    await gateways[0].step(3)
    assert await history.register.record(1) is not None
    await gateways[0].close()
