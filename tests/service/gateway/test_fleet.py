"""Which server takes a call, and how many calls; what gateways know of servers; the driver of pushes."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from gateway.errors import NoServer
from gateway.fleet.engine_client import EngineClient
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import LONGEST_S, Breaker, EngineLoad, FleetServer, Registration, next_limit
from gateway.fleet.generate_request import AllowedVersions
from gateway.fleet.placement import WantedServer, choose_server
from gateway.policies.push import PushBounds, PushDriver
from gateway.settings import ConcurrencySettings
from rollout_queue import clock
from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.contract.serving_plan import Pin, plan_of
from rollout_queue.redis import key_names
from rollout_queue.redis.plan_store import PushLease, ServingRegister
from rollout_queue.redis.policy_register import PolicyRegister
from tests.support.gateway.fake_rollout_server import FakeRolloutServer
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.redis_clients import async_redis_at
from tests.support.serving import free_port, serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until

NOWHERE = "http://127.0.0.1:1"


@dataclass
class Busy:
    id: str
    load: int = 0


def placed(servers: list[Busy], sessions: int) -> dict[str, str]:
    names = [f"session-{n}" for n in range(sessions)]
    return {name: server.id for name in names if (server := choose_server(servers, name)) is not None}


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_sessions_spread_evenly_and_stay_where_they_are(count: int) -> None:
    servers = [Busy(f"r{n}") for n in range(count)]
    before = placed(servers, 4000)
    shares = Counter(before.values()).values()
    assert len(shares) == count
    assert max(shares) < 1.2 * min(shares)
    after = placed(servers[1:], 4000)
    assert all(after[name] == home for name, home in before.items() if home != "r0")


def test_an_overloaded_server_keeps_its_sessions_only_while_others_are_as_busy() -> None:
    one, two = Busy("r0"), Busy("r1")
    (session,) = [name for name, home in placed([one, two], 20).items() if home == "r0"][:1]

    def taken_by(in_flight: int, elsewhere: int) -> str:
        one.load, two.load = in_flight, elsewhere
        server = choose_server([one, two], session)
        assert server is not None
        return server.id

    loads = [(4, 0), (5, 0), (150, 100), (151, 100)]
    assert [taken_by(*each) for each in loads] == ["r0", "r1", "r0", "r1"]
    assert choose_server([], session) is None


def test_a_breaker_opens_after_failures_in_a_row_and_for_longer_each_time(stopped: TurnedClock) -> None:
    breaker = Breaker()
    for _ in range(2):
        breaker.failed(unreachable=False)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(unreachable=False)
    assert breaker.state == "closed"
    lengths = []
    for _ in range(8):
        breaker.failed(unreachable=False)
        assert (breaker.state, breaker.allows_call) == ("open", False)
        lengths.append(breaker.open_until - clock.monotonic())
        breaker.failed(unreachable=False)  # a call that was in flight when the breaker opened
        assert breaker.open_until - clock.monotonic() == lengths[-1]
        stopped.turn(lengths[-1] + 0.001)
        assert breaker.enter()
        assert not breaker.allows_call, "one trial at a time"
    assert lengths[1] > lengths[0]
    assert 0.75 <= lengths[-1] / LONGEST_S <= 1.25
    breaker.leave()
    assert breaker.allows_call, "a trial without a result allows the next one"
    breaker.enter()
    breaker.succeeded()
    assert (breaker.state, breaker.openings, breaker.allows_call) == ("closed", 0, True)


@asynccontextmanager
async def fleet_on(redis: Redis, *engines: str) -> AsyncIterator[Fleet]:
    """The fleet of a gateway with these bare engines."""
    engine = EngineClient(5.0)
    fleet = Fleet(redis, engine, None, list(engines))
    yield fleet
    await fleet.close()
    await engine.close()
    await redis.aclose()


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[Fleet]:
    """Two servers that are ready with the served version."""
    async with fleet_on(async_redis_at(redis_url)) as fleet:
        for name in ("r0", "r1"):
            registration = Registration(id=name, url=NOWHERE, engine_url=NOWHERE)
            fleet.servers[name] = FleetServer(registration, state="ready", version=1)
        fleet.adopt(plan_of(b"1"))
        yield fleet


def chosen(fleet: Fleet, version: int | None = None, avoid: str = "") -> set[str]:
    wanted = (WantedServer(f"s{n}", AllowedVersions(version), avoid) for n in range(32))
    servers = map(fleet.rotation.choose, wanted)
    return {server.id for server in servers if server is not None}


def test_calls_are_steered_away_from_a_server_that_loads_or_is_told_to(fleet: Fleet) -> None:
    r0, r1 = fleet.servers.values()
    assert chosen(fleet) == {"r0", "r1"}
    r0.state = "loading"
    assert chosen(fleet) == {"r1"}
    r1.pushing = True
    assert chosen(fleet) == {"r0", "r1"}, "calls wait on both, so that neither is preferred"
    r0.state = "ready"
    assert chosen(fleet) == {"r0"}
    r0.state = r1.state = "dead"
    assert chosen(fleet) == set()


@pytest.mark.usefixtures("stopped")
def test_an_open_breaker_takes_a_server_out_and_a_failed_one_is_avoided(fleet: Fleet) -> None:
    r0, r1 = fleet.servers.values()
    r0.breaker.failed(unreachable=True)
    assert chosen(fleet) == {"r1"}
    assert chosen(fleet, avoid="r1") == {"r1"}, "the server that just failed is better than none"
    r0.breaker.succeeded()
    assert chosen(fleet, avoid="r1") == {"r0"}
    for _ in range(3):
        r0.breaker.failed(unreachable=False)
    assert chosen(fleet) == {"r1"}
    del fleet.servers["r1"]
    assert chosen(fleet) == {"r0"}, "a server that fails calls is better than none"
    r0.breaker.failed(unreachable=True)
    assert chosen(fleet) == set(), "an unreachable server is not better than none"
    assert r1.report().breaker == "closed"


def test_a_pinned_call_goes_to_its_version_alone(fleet: Fleet) -> None:
    r0, _ = fleet.servers.values()
    r0.version = 7
    assert chosen(fleet) == {"r1"}
    assert chosen(fleet, version=7) == {"r0"}
    r0.state = "dead"
    assert (chosen(fleet, version=7), fleet.has(7), fleet.has(8)) == (set(), True, False)
    r0.version = None  # it starts anew
    assert not fleet.has(7)
    fleet.adopt(replace(fleet.plan, pins=(Pin(id=1, server="r0", version=7, since=0.0),)))
    assert fleet.has(7), "it comes back with the version that it keeps"


async def test_a_half_open_server_takes_one_call_and_all_once_it_answered(fleet: Fleet) -> None:
    del fleet.servers["r1"]
    (r0,) = fleet.servers.values()
    r0.breaker.failed(unreachable=True)
    r0.breaker.try_soon()
    trial = await fleet.acquire(WantedServer("s"), 0.1)
    assert trial.enter()
    with pytest.raises(NoServer) as caught:
        await fleet.acquire(WantedServer("s"), 0.05)
    assert "breaker half_open" in caught.value.message
    waiting = asyncio.create_task(fleet.acquire(WantedServer("s"), 5))
    await asyncio.sleep(0)  # the second call begins to wait
    fleet.call_succeeded(trial)
    assert await asyncio.wait_for(waiting, PATIENCE_S) is r0


async def test_a_server_that_hangs_does_not_delay_the_state_of_the_others(fleet: Fleet) -> None:
    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)  # longer than the fleet waits for an answer
        writer.close()

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = hanging.sockets[0].getsockname()[1]
    fleet.servers.clear()
    slow = FleetServer(Registration(id="slow", engine_url=f"http://127.0.0.1:{port}"), "ready")
    gone = FleetServer(Registration(id="gone", engine_url=NOWHERE), "ready")
    fleet.servers |= {"slow": slow, "gone": gone}
    began = time.monotonic()
    await fleet.refresh()
    assert time.monotonic() - began < 30.0, "the fleet has not waited for the answer"
    assert (slow.state, gone.state) == ("ready", "dead"), (
        "a late server is not dead, one that refuses connections is"
    )
    await fleet.close()
    hanging.close()


async def test_what_is_served_or_drained_meanwhile_is_not_undone_by_an_older_reading(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_on(async_redis_at(redis_url), NOWHERE, "http://127.0.0.1:2") as fleet:
        first, second = fleet.servers
        read, go_on, execute = asyncio.Event(), asyncio.Event(), Pipeline.execute
        loop = asyncio.get_running_loop()

        async def late(pipeline: Pipeline) -> Any:
            answer = await execute(pipeline)
            if asyncio.get_running_loop() is loop:  # gateways of other tests go on
                read.set()
                await go_on.wait()
            return answer

        await fleet.set_drained(second, drained=True)
        monkeypatch.setattr(Pipeline, "execute", late)
        reading = asyncio.create_task(fleet.refresh())
        await read.wait()
        fleet.adopt(plan_of(b"7"))
        await fleet.set_drained(first, drained=True)
        await fleet.set_drained(second, drained=False)
        go_on.set()
        await reading
        assert fleet.serving == 7
        assert [server.drained for server in fleet.servers.values()] == [True, False]
        await fleet.set_drained(first, drained=False)


class CountingRedis(Redis):
    """Counts what this client sends, because other tests' gateways use the same server."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.sent = Counter[str]()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        self.sent[str(args[0])] += 1
        return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, *given: Any, **options: Any) -> Pipeline:
        self.sent["PIPELINE"] += 1
        return super().pipeline(*given, **options)


async def test_registrations_are_read_after_a_change_and_a_renewal_reads_its_own(redis_url: str) -> None:
    redis = cast(CountingRedis, CountingRedis.from_url(redis_url))
    async with fleet_on(redis) as here, fleet_on(redis) as there:
        registration = Registration(id="r0", url=NOWHERE, engine_url=NOWHERE, process="p0")
        await here.register(registration)
        await there.refresh()
        assert there.servers["r0"].registration.process == "p0"
        assert redis.sent["HGETALL"] > 0
        redis.sent.clear()
        stored_at = there.servers["r0"].registration.registered_at
        renewed = await here.register(registration)
        await there.refresh()
        assert redis.sent["HGETALL"] == 0
        assert renewed.registration.registered_at > stored_at
        url = f"{NOWHERE}1"
        await here.register(Registration(id="r1", url=url, engine_url=url, process="p1"))
        await there.refresh()
        assert set(there.servers) == {"r0", "r1"}
        assert await here.remove("r1")
        await there.refresh()
        assert set(there.servers) == {"r0"}
        await redis.hdel(
            key_names.SERVERS, "r0"
        )  # a gateway of an earlier version does not say that it changed
        await redis.delete(key_names.SERVERS_CHANGED)
        await there.refresh()
        assert not there.servers


# Two gateways


def test_a_number_is_given_once_among_gateways(gateway: RunningGateway, other: RunningGateway) -> None:
    with serving(FakeRolloutServer().app()) as url:
        body = {"id": "r0", "url": url, "engine_url": url}
        assert gateway.admin("POST", "/rollout_servers", body).status_code == 200
        # whichever gateway drives the pushes knows it
        wait_until(lambda: other.server_versions().get("r0") is not None)
        for each, location in ((gateway, "file:///a"), (other, "file:///b")):
            assert each.admin("POST", "/policies", {"location": location}).status_code == 200
        known = gateway.admin("GET", "/policies").json()["data"]
    expected = [(0, None), (1, "file:///a"), (2, "file:///b")]
    assert [(record["version"], record["location"]) for record in known] == expected
    taken = other.admin("POST", "/policies", {"version": 2, "location": "file:///c"})
    assert taken.status_code == 409


def test_a_server_that_is_drained_at_one_gateway_is_drained_at_both(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    for verb, state, status in (("drain", "draining", 503), ("resume", "ready", 200)):
        assert gateway.admin("POST", f"/rollout_servers/engine-0/{verb}", {}).status_code == 200
        wait_until(
            lambda: other.admin("GET", "/rollout_servers").json()["data"][0]["state"] == state  # noqa: B023
        )
        assert other.chat().status_code == status


# The driver of pushes, step by step

BOUNDS = PushBounds(timeout_s=60, lease_s=60, max_unavailable=0.25, fetch_fan_out=4, max_version_lag=4)


@pytest.mark.parametrize("registered", [True, False])
async def test_a_push_waits_for_a_server_that_registered_at_another_gateway(
    own_backends: Backends, registered: bool
) -> None:
    """Nothing listens at the server's address, so the push cannot go on, and must not end without it."""
    own_backends.clear(None)
    async with fleet_on(async_redis_at(own_backends.redis_url)) as fleet:
        register, serving = PolicyRegister(fleet.redis), ServingRegister(fleet.redis)
        record = PolicyRecord(version=1, location="file:///policies/1", created_at=time.time())
        assert await register.register(record, await register.look())
        await serving.change(lambda plan: plan.begun(1, time.time(), force=False))
        if registered:
            url = f"http://127.0.0.1:{free_port()}"
            registration = Registration(id="r0", url=url, engine_url=url, registered_at=time.time())
            await fleet.redis.hset(key_names.SERVERS, "r0", msgspec.json.encode(registration).decode())
        driver = PushDriver(fleet.redis, fleet, BOUNDS)
        await driver.step()
        plan = await serving.read()
        assert (plan.pushing, plan.serving) == ((True, None) if registered else (False, 1))
        await driver.close()


async def test_a_step_over_a_thousand_servers_writes_its_notes_at_once_and_keeps_the_lease(
    own_backends: Backends, turned: TurnedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is renewed while a step stands still."""
    own_backends.clear(None)
    redis = cast(CountingRedis, CountingRedis.from_url(own_backends.redis_url))
    async with fleet_on(redis) as fleet:
        register, serving = PolicyRegister(fleet.redis), ServingRegister(fleet.redis)
        record = PolicyRecord(version=1, location="file:///policies/1", created_at=time.time())
        assert await register.register(record, await register.look())
        await serving.change(lambda plan: plan.begun(1, time.time(), force=False))
        for number in range(1000):
            registration = Registration(id=f"r{number}", url=NOWHERE, engine_url=NOWHERE)
            fleet.servers[f"r{number}"] = FleetServer(registration, state="dead")
        reached, go_on, look = asyncio.Event(), asyncio.Event(), PolicyRegister.record

        async def late(register: PolicyRegister, version: int) -> PolicyRecord | None:
            reached.set()
            await go_on.wait()
            return await look(register, version)

        driver, other = PushDriver(fleet.redis, fleet, BOUNDS), PushLease(fleet.redis, BOUNDS.lease_s)
        monkeypatch.setattr(PolicyRegister, "record", late)
        stepping = asyncio.create_task(driver.step())
        await reached.wait()
        for _ in range(3):
            await fleet.redis.pexpire(
                key_names.PUSH_LEASE, 20_000
            )  # most of the lease passes, by Redis' clock
            turned.turn(BOUNDS.lease_s / 3)
            while await fleet.redis.pttl(key_names.PUSH_LEASE) <= 20_000:  # noqa: ASYNC110 - Redis tells no event
                await asyncio.sleep(0)
            assert not await other.hold()
        redis.sent.clear()
        go_on.set()
        await stepping
        push = (await serving.read()).push
        assert push is not None
        assert len(await serving.server_pushes(push.id)) == 1000
        assert redis.sent["EVALSHA"] + redis.sent["PIPELINE"] < 10, redis.sent
        await driver.close()
        assert await other.hold()


# The limits of calls that follow the load of engines: properties of the arithmetic, and the settings

SETTINGS = ConcurrencySettings(first=32, least=4, most=512)
COUNTS = st.integers(0, 2000)
LOADS = st.builds(EngineLoad, running=COUNTS, waiting=COUNTS, kv_usage=st.floats(0, 1))
LIMITS = st.none() | st.integers(SETTINGS.least, SETTINGS.most)


@given(LIMITS, LOADS)
def test_a_limit_stays_within_its_bounds(limit: int | None, load: EngineLoad) -> None:
    found = next_limit(limit, load, SETTINGS)
    assert found is not None
    assert SETTINGS.least <= found <= SETTINGS.most


@given(st.integers(SETTINGS.least, SETTINGS.most), LOADS)
def test_a_limit_never_grows_while_calls_wait_or_the_cache_is_full(limit: int, load: EngineLoad) -> None:
    found = next_limit(limit, load, SETTINGS)
    assert found is not None
    if load.waiting or load.kv_usage is None or load.kv_usage >= SETTINGS.kv_target:
        assert found <= limit
    else:
        assert limit <= found <= 2 * limit


@given(st.integers(SETTINGS.least, SETTINGS.most), LOADS)
def test_a_limit_is_cut_once_for_one_overload(limit: int, load: EngineLoad) -> None:
    """While the engine has more calls than the limit, the last cut is still having its effect."""
    if load.calls > limit:
        found = next_limit(limit, load, SETTINGS)
        assert found is not None
        assert found >= limit


@given(LIMITS, COUNTS, COUNTS)
def test_engines_that_report_no_cache_have_no_limit(limit: int | None, running: int, waiting: int) -> None:
    assert next_limit(limit, EngineLoad(running, waiting), SETTINGS) is None
    full = EngineLoad(running, waiting, 1.0)
    assert next_limit(limit, full, ConcurrencySettings(adaptive=False)) is None


@given(st.floats(0.001, 0.05))
def test_a_limit_settles_where_the_cache_is_as_full_as_wanted(share: float) -> None:
    """Each call takes the same share of the cache, and there are always enough calls."""
    limit: int | None = None
    for _ in range(60):
        running = 8 if limit is None else limit
        limit = next_limit(limit, EngineLoad(running, 0, min(1.0, running * share)), SETTINGS)
    assert limit is not None
    wanted = SETTINGS.kv_target / share
    most = SETTINGS.kv_high / share
    assert min(wanted - 1, SETTINGS.most) - 1 <= limit <= max(most, SETTINGS.least)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="least"):
        ConcurrencySettings(least=9, most=8)
    with pytest.raises(ValidationError, match="kv_target"):
        ConcurrencySettings(kv_target=0.95)
