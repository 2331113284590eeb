"""Placement: a conversation stays on its prefix's server, and a choice costs the same in a large fleet."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import StateConflict
from gateway.fleet.call_queue import CallQueue
from gateway.fleet.engine_client import EngineClient
from gateway.fleet.fleet import DESCRIBED, Fleet
from gateway.fleet.fleet_server import FleetServer, Registration
from gateway.fleet.generate_request import ANY, AllowedVersions
from gateway.fleet.placement import SHORTLIST, Ring, Rotation, WantedServer
from gateway.fleet.server_status import STATUS_PER_S, StatusSchedule, distinct
from rollout_queue.contract.serving_plan import plan_of
from rollout_queue.http.json_routes import FairTurns
from tests.support.hypothesis_profiles import examples
from tests.support.turned_clock import TurnedClock

LARGE = 200


def rotation_of(count: int) -> Rotation:
    servers = {}
    for name in (f"r{n}" for n in range(count)):
        registration = Registration(id=name, url=f"http://{name}", engine_url=f"http://{name}")
        servers[name] = FleetServer(registration, state="ready", version=1, error=None)
    rotation = Rotation(servers)
    rotation.set_plan(plan_of(b"1"))
    return rotation


def chosen(rotation: Rotation, wanted: WantedServer) -> str:
    server = rotation.place(wanted)
    assert server is not None
    return server.id


@pytest.mark.parametrize("count", [3, LARGE])
def test_a_conversation_stays_on_the_server_of_its_prefix_until_it_is_too_busy(count: int) -> None:
    rotation = rotation_of(count)
    home = chosen(rotation, WantedServer("s"))
    other = next(name for name in rotation.servers if name != home)
    wanted = WantedServer("s", cached_at=other, cached_version=1)
    assert chosen(rotation, wanted) == other
    rotation.servers[other].in_flight = 100
    assert chosen(rotation, wanted) != other
    rotation.servers[other].in_flight = 0
    rotation.servers[other].state = "loading"
    assert chosen(rotation, wanted) != other
    assert rotation.placed == {"first": 1, "prefix": 1, "busy": 1, "unable": 1}


@pytest.mark.parametrize("count", [3, LARGE])
def test_a_conversation_goes_home_when_its_prefix_is_nowhere_any_more(count: int) -> None:
    rotation = rotation_of(count)
    home = chosen(rotation, WantedServer("s"))
    other = next(name for name in rotation.servers if name != home)
    assert chosen(rotation, WantedServer("s", cached_at=other, cached_version=0)) == home
    assert chosen(rotation, WantedServer("s", cached_at="left", cached_version=1)) == home
    assert chosen(rotation, WantedServer("s", avoid=home)) != home
    rotation.servers[other].limit = 0
    assert chosen(rotation, WantedServer("s", cached_at=other, cached_version=1)) == home
    assert rotation.placed == {"first": 1, "flushed": 1, "gone": 1, "failover": 1, "full": 1}


def test_an_adapters_prefix_belongs_to_its_version() -> None:
    rotation = rotation_of(3)
    server = rotation.servers["r1"]
    for each in rotation.servers.values():
        each.adapters = {("a", 4): "a-4", ("a", 5): "a-5"}
    assert WantedServer("s", AllowedVersions(5, "a"), cached_at="r1", cached_version=5).cached_by(server)
    assert not WantedServer("s", AllowedVersions(5, "a"), cached_at="r1", cached_version=4).cached_by(server)
    assert (
        chosen(rotation, WantedServer("s", AllowedVersions(5, "a"), cached_at="r1", cached_version=5)) == "r1"
    )


def test_sessions_spread_over_a_large_fleet_and_few_move_when_a_server_leaves() -> None:
    count = 60
    rotation = rotation_of(count)
    sessions = [f"session-{n}" for n in range(100 * count)]
    before = {name: chosen(rotation, WantedServer(name)) for name in sessions}
    shares = Counter(before.values())
    assert len(shares) == count
    assert max(shares.values()) < 1.5 * 100
    del cast(dict[str, Any], rotation.servers)["r7"]
    moved = [name for name in sessions if chosen(rotation, WantedServer(name)) != before[name]]
    assert {name for name, home in before.items() if home == "r7"} <= set(moved)
    assert len(moved) < 3 * shares["r7"], "some shortlists have another server in its place"


def test_a_choice_looks_at_few_servers_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def takes_calls(server: FleetServer) -> bool:
        looked.append(server.id)
        return server.able

    monkeypatch.setattr(FleetServer, "takes_calls", property(takes_calls))
    rotation = rotation_of(LARGE)
    chosen(rotation, WantedServer("s"))
    assert len(looked) == SHORTLIST
    looked.clear()
    chosen(rotation, WantedServer("s", cached_at="r5"))
    assert set(looked) == {"r5"}


def test_the_forks_of_one_session_spread_once_its_own_servers_are_too_busy() -> None:
    rotation = rotation_of(LARGE)
    for _ in range(1000):
        server = rotation.choose(WantedServer("hot"))
        assert server is not None
        server.enter()
    loads = [server.in_flight for server in rotation.servers.values()]
    assert sum(load > 0 for load in loads) > 3 * SHORTLIST
    assert max(loads) <= 40, "1000 forks over 4 shortlists of 16 servers are 16 a server"


def test_all_servers_are_looked_at_before_a_call_has_to_wait() -> None:
    rotation = rotation_of(LARGE)
    for server in rotation.servers.values():
        server.state = "dead"
    assert rotation.choose(WantedServer("s")) is None
    rotation.servers["r77"].state = "ready"
    assert chosen(rotation, WantedServer("s")) == "r77"


def test_a_ring_follows_the_fleet() -> None:
    ring, ids = Ring(), [f"r{n}" for n in range(50)]
    assert ring.shortlist("s", 16) == []
    ring.follow(ids)
    whole = ring.shortlist("s", 50)
    assert sorted(whole) == sorted(ids)
    few = ring.shortlist("s", 16)
    assert few == whole[:16]
    assert ring.shortlist("s", 16, widening=1) != few
    ring.follow([each for each in ids if each != few[0]])
    assert ring.shortlist("s", 15) == few[1:]


def test_a_large_fleet_is_asked_for_its_state_in_turn_and_what_changes_at_once() -> None:
    servers, schedule = rotation_of(1000).servers, StatusSchedule()
    schedule.due(servers.values(), 0.0)
    turns = [schedule.due(servers.values(), 0.5 * n) for n in range(1, 11)]
    assert {len(turn) for turn in turns} == {STATUS_PER_S / 2}
    assert {server.id for turn in turns for server in turn} == set(servers)
    servers["r3"].watched = servers["r4"].pushing = True
    servers["r5"].state = "loading"
    for n in range(11, 14):
        assert {"r3", "r4", "r5"} <= {server.id for server in schedule.due(servers.values(), 0.5 * n)}


async def test_calls_wait_in_the_order_of_their_arrival_and_get_one_place_each() -> None:
    rotation = rotation_of(1)
    (server,) = rotation.servers.values()
    server.limit = 1
    queue = CallQueue(rotation)
    server.freed = queue.freed
    trial = server.enter()
    order: list[int] = []

    async def call(number: int) -> None:
        entered = (await queue.wait(WantedServer(f"s{number}"), 60.0)).enter()
        assert server.load == 1
        order.append(number)
        await asyncio.sleep(0)  # the answer
        server.leave(entered)

    calls = [asyncio.create_task(call(n)) for n in range(5)]
    await asyncio.sleep(0)  # they begin to wait
    assert len(queue) == 5
    calls[1].cancel()
    server.leave(trial)
    await asyncio.gather(*calls, return_exceptions=True)
    assert order == [0, 2, 3, 4]
    assert (len(queue), server.load) == (0, 0)


class Line:
    """A queue before one server, which takes one call, and the order in which calls entered it."""

    def __init__(self) -> None:
        self.rotation = rotation_of(1)
        (self.server,) = self.rotation.servers.values()
        self.server.limit = 1
        self.queue = CallQueue(self.rotation)
        self.server.freed = self.queue.freed
        self.order: list[str] = []

    async def call(self, name: str, waits_s: float = 600.0, **wanted: Any) -> None:
        server = await self.queue.wait(WantedServer(name, **wanted), waits_s)
        entered = server.enter()
        self.order.append(name)
        await asyncio.sleep(0)  # the answer
        server.leave(entered)

    async def arrive(self, name: str, waits_s: float = 600.0, **wanted: Any) -> asyncio.Task[None]:
        waiting = asyncio.create_task(self.call(name, waits_s, **wanted))
        await asyncio.sleep(0)  # it begins to wait
        return waiting


@pytest.mark.parametrize("away_s", [0.0, 25.0, 31.0])
async def test_a_call_that_comes_again_has_its_former_place(turned: TurnedClock, away_s: float) -> None:
    """Also when it comes again and again, and when its client has left it."""
    line = Line()
    trial = line.server.enter()
    first = await line.arrive("first", 20.0)
    turned.turn(1.0)
    left = await line.arrive("left")
    later = [await line.arrive(f"later-{number}") for number in range(3)]
    turned.turn(20.0)
    with pytest.raises(TimeoutError):
        await first
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    turned.turn(away_s / 2)
    again = await line.arrive("first", 0.0)
    with pytest.raises(TimeoutError):
        await again
    turned.turn(away_s)
    late = [await line.arrive("new"), await line.arrive("left"), await line.arrive("first")]
    line.server.leave(trial)
    await asyncio.gather(*later, *late)
    back = ["first", "left"] if away_s * 1.5 < 30 else ["first"] if away_s < 30 else []
    rest = [name for name in ("new", "left", "first") if name not in back]
    assert line.order == [*back, "later-0", "later-1", "later-2", *rest]


@pytest.mark.parametrize("allowed", [ANY, AllowedVersions(1)], ids=["the same versions", "other versions"])
async def test_owners_take_turns_whatever_their_calls_wish(allowed: AllowedVersions) -> None:
    line = Line()
    trial = line.server.enter()
    calls = [await line.arrive(f"a{number}", owner="a") for number in range(80)]
    calls += [await line.arrive(f"b{number}", owner="b", allowed=allowed) for number in range(3)]
    calls.append(await line.arrive("c0", owner="c"))
    line.server.leave(trial)
    await asyncio.gather(*calls)
    assert line.order[:7] == ["a0", "b0", "c0", "a1", "b1", "a2", "b2"]
    assert line.order[7:] == [f"a{number}" for number in range(3, 80)]


async def test_an_owner_whose_calls_come_one_by_one_takes_no_more_than_its_turn() -> None:
    line = Line()
    trial = line.server.enter()
    many = [await line.arrive(f"a{number}", owner="a") for number in range(6)]

    async def one_by_one() -> None:
        for number in range(3):
            await line.call(f"b{number}", owner="b")

    calls = asyncio.create_task(one_by_one())
    await asyncio.sleep(0)  # it begins to wait
    line.server.leave(trial)
    await asyncio.gather(calls, *many)
    assert line.order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=30))
async def test_every_call_that_waits_gets_one_place_in_its_owners_turn(
    arrivals: list[tuple[str, bool, bool]],
) -> None:
    """Also if some name a version, and some leave the line."""
    line = Line()
    trial = line.server.enter()
    calls: dict[str, asyncio.Task[None]] = {}
    for number, (owner, prefers, _) in enumerate(arrivals):
        allowed = AllowedVersions(1) if prefers else ANY
        calls[f"{owner}{number}"] = await line.arrive(f"{owner}{number}", owner=owner, allowed=allowed)
    left = {name for name, (_, _, leaves) in zip(calls, arrivals, strict=True) if leaves}
    for name in left:
        calls[name].cancel()
    await asyncio.gather(*(calls[name] for name in left), return_exceptions=True)
    line.server.leave(trial)
    await asyncio.gather(*(call for name, call in calls.items() if name not in left))
    owners = dict.fromkeys(owner for owner, _, _ in arrivals)
    lines = [[name for name in calls if name[0] == owner and name not in left] for owner in owners]
    assert line.order == [name for turn in zip_longest(*lines) for name in turn if name is not None]
    assert (len(line.queue), line.server.load, line.server.promised) == (0, 0, 0)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["call", "frees", "polls"]),
        st.sampled_from(["r0", "r1", "r2", ""]),
        st.sampled_from([ANY, AllowedVersions(1), AllowedVersions(prefers=1)]),
        st.sampled_from("ab"),
    ),
    max_size=25,
)


@settings(max_examples=examples(200), deadline=None)
@given(MOVES)
async def test_no_server_has_room_while_a_call_waits_that_it_may_take(
    moves: list[tuple[str, str, AllowedVersions, str]],
) -> None:
    """Calls that were moved away from a server wait among others: they hold nobody up, and go back to that
    server while no other has room."""
    fleet = Fleet(cast(Any, None), cast(Any, None), None)
    fleet.servers |= rotation_of(3).servers
    fleet.adopt(plan_of(b"1"))
    trials = {server.id: [server.enter()] for server in fleet.servers.values()}
    for server in fleet.servers.values():
        server.limit, server.freed = 1, fleet.queue.freed
    waiting: list[asyncio.Task[None]] = []

    async def call(wanted: WantedServer) -> None:
        server = await fleet.acquire(wanted, 600.0)
        trials[server.id].append(server.enter())

    for number, (move, server_id, allowed, owner) in enumerate(moves):
        if move == "call":
            wanted = WantedServer(f"s{number}", allowed, server_id, owner=owner)
            waiting.append(asyncio.create_task(call(wanted)))
        elif move == "polls":
            fleet.queue.serve()
        elif server_id and trials[server_id]:
            fleet.servers[server_id].leave(trials[server_id].pop())
        for _ in range(3):
            await asyncio.sleep(0)  # they begin to wait, or go on
        if any(not each.done() for each in waiting):
            assert not [each.id for each in fleet.servers.values() if each.has_room]
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("leaves", [False, True])
async def test_owners_take_turns_at_long_prompts(leaves: bool) -> None:
    turns, order, ends = FairTurns(1), list[str](), asyncio.Event()

    async def work(name: str) -> None:
        async with turns.of(name[0]):
            order.append(name)
            await ends.wait()

    names = ["a0", "a1", "a2", "a3", "b0", "c0"]
    calls = {name: asyncio.create_task(work(name)) for name in names}
    await asyncio.sleep(0)  # they begin to wait
    gone = ["a0", "a1"] if leaves else []
    for name in gone:
        calls[name].cancel()
    ends.set()
    await asyncio.gather(*calls.values(), return_exceptions=True)
    expected = ["a0", "b0", "c0", "a2", "a3"] if leaves else ["a0", "a1", "b0", "c0", "a2", "a3"]
    assert sorted(order) == sorted(expected)
    assert order.index("b0") <= 2
    assert order.index("c0") <= 3
    async with turns.of("d"):
        pass


@pytest.mark.parametrize("sign", ["a call ends", "a server has come"])
async def test_a_place_is_not_given_to_a_call_that_is_just_leaving(sign: str) -> None:
    """It is cancelled, and has not run since: a client has left, or the call's time is over."""
    line = Line()
    trial = line.server.enter()
    calls = [await line.arrive(f"a{number}", owner="a") for number in range(3)]
    other = await line.arrive("b0", owner="b")
    for call in calls[:2]:
        call.cancel()
    if sign == "a call ends":
        line.server.leave(trial)
    else:
        line.server.limit = 2
        line.queue.serve()
        line.server.leave(trial)
    await asyncio.gather(*calls, other, return_exceptions=True)
    assert [call.cancelled() for call in (*calls, other)] == [True, True, False, False]
    assert sorted(line.order) == ["a2", "b0"]
    assert (len(line.queue), line.server.load, line.server.promised) == (0, 0, 0)


async def test_a_call_that_was_served_leaves_no_place_to_the_next_of_its_session() -> None:
    line = Line()
    await line.call("served", 0.0)
    trial = line.server.enter()
    others = [await line.arrive("other"), await line.arrive("served")]
    line.server.leave(trial)
    await asyncio.gather(*others)
    assert line.order == ["served", "other", "served"]


async def test_the_kept_places_are_bounded() -> None:
    line = Line()
    line.server.limit = 0
    for number in range(5000):
        with pytest.raises(TimeoutError):
            await line.queue.wait(WantedServer(f"s{number}"), 0.0)
    for _ in range(50):
        with pytest.raises(TimeoutError):
            await line.queue.wait(WantedServer("many"), 0.0)
    assert line.queue.kept_places <= 4096 + 16


async def test_a_place_of_a_caller_that_leaves_goes_to_the_next() -> None:
    rotation = rotation_of(1)
    (server,) = rotation.servers.values()
    server.limit = 0
    queue = CallQueue(rotation)
    first, second = (asyncio.create_task(queue.wait(WantedServer(name), 60.0)) for name in "ab")
    await asyncio.sleep(0)  # they begin to wait
    server.limit = 1
    queue.serve()
    assert server.promised == 1
    first.cancel()
    assert await second is server
    assert (server.promised, len(queue)) == (0, 0)
    with pytest.raises(TimeoutError):
        await CallQueue(Rotation({})).wait(WantedServer("c"), 0.0)


@pytest.mark.parametrize(("servers", "end"), [(1, ""), (DESCRIBED, ""), (DESCRIBED + 2, ", and 2 more")])
def test_the_first_servers_are_described_and_the_others_counted(servers: int, end: str) -> None:
    nobody = cast(Any, None)
    fleet = Fleet(nobody, nobody, None, [f"http://engine-{number}" for number in range(servers)])
    reason = fleet.why_no_server()
    assert reason.count("its breaker") == min(servers, DESCRIBED)
    assert reason.endswith(f"its breaker closed{end}")


def test_engines_that_are_full_are_no_fault_and_are_called_full() -> None:
    nobody = cast(Any, None)
    fleet = Fleet(nobody, nobody, None, ["http://engine-0", "http://engine-1"])
    first, second = fleet.servers.values()
    for each in (first, second):
        each.state, each.version, each.error, each.limit, each.in_flight = "ready", 3, None, 32, 32
    assert fleet.fault() is None
    full = f"{first.id} has 32 of 32 calls, {second.id} has 32 of 32 calls"
    assert fleet.why_no_server() == f"all engines are full: {full}; 0 wait"
    assert fleet.why_no_server(AllowedVersions(3)).startswith("all engines are full")
    assert fleet.why_no_server(AllowedVersions(2)).startswith(
        f"no engine can serve version 2: {first.id} is ready at"
    )
    second.state = "dead"
    assert fleet.why_no_server() == f"all engines are full: {first.id} has 32 of 32 calls; 0 wait"
    first.state = "loading"
    assert fleet.fault() == fleet.why_no_server()
    assert "no engine can serve" in fleet.why_no_server()


# Which server a registration comes from: one that started again, or a second one in its place


@dataclass
class Answers:
    """The processes that answer at their URLs."""

    statuses: dict[str, bytes]

    async def get(self, url: str, timeout_s: float, headers: object = None) -> bytes:
        if url not in self.statuses:
            raise aiohttp.ClientError("nobody answers")
        return self.statuses[url]


def server(
    name: str, process: str | None, url: str = "http://r", displaced: tuple[str, ...] = ()
) -> Registration:
    return Registration(id=name, url=url, engine_url=f"{url}:1", process=process, displaced=displaced)


async def stored(
    new: Registration, *known: Registration, **statuses: bytes
) -> tuple[tuple[str, ...], list[str]]:
    engine = cast(
        EngineClient, cast(Any, Answers({f"http://{name}/status": s for name, s in statuses.items()}))
    )
    registration, taken = await distinct(new, known, engine, {})
    return registration.displaced, taken


async def test_a_server_that_started_again_takes_its_own_place() -> None:
    assert await stored(server("a", "p2"), server("a", "p1")) == (("p1",), [])


async def test_a_server_with_a_new_name_takes_the_place_of_the_former_one_at_its_url() -> None:
    former = server("a", "p2", displaced=("p1",))
    assert await stored(server("b", "p3"), former, server("c", "p9", "http://other")) == (("p1", "p2"), ["a"])


async def test_a_process_that_registers_again_takes_nobodys_place() -> None:
    assert await stored(server("a", "p1"), server("a", "p1")) == ((), [])
    assert await stored(server("a", None), server("a", None, displaced=("p1",))) == (("p1",), [])


async def test_a_process_whose_place_was_taken_is_a_second_server() -> None:
    with pytest.raises(StateConflict, match="the id a"):
        await stored(server("a", "p1"), server("a", "p2", displaced=("p1",)))


async def test_a_server_that_still_answers_keeps_its_place() -> None:
    status = b'{"process": "p1", "state": "ready", "version": 1}'
    with pytest.raises(StateConflict, match="the URL http://r"):
        await stored(server("b", "p2"), server("a", "p1"), r=status)
    assert await stored(server("b", "p3"), server("a", "p2"), r=status) == (("p2",), ["a"])
