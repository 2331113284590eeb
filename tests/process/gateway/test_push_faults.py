"""Bad days around a push, with real gateways, rollout servers and a Redis, while calls go on.

After each, no call has failed, every recorded token has the version that sampled it, the audit finds nothing,
and the fleet ends on one version (`four_ends`). In `tests/service/gateway`, gateways and servers are in one
process.
"""

import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.support.gateway.disagreements import disagreements
from tests.support.gateway.push_system import PUSH_TIMEOUT_S, SHORT, PushSystem, limit_files, push_system
from tests.support.gateway.running import ADMIN_KEY, Backends
from tests.support.waiting import wait_until

AGREES_WITHIN_S, AND_LOOKS = 1.5, 10
"""Gateways poll ten times a second. A poll of a busy machine takes as long as a look of the test."""


@pytest.fixture(scope="module")
def running_system(backends: Backends, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PushSystem]:
    with push_system(tmp_path_factory.mktemp("push-faults"), backends) as system:
        yield system


@pytest.fixture
def system(running_system: PushSystem) -> Iterator[PushSystem]:
    yield running_system
    running_system.heal()


# Gateways


def test_another_gateway_goes_on_with_the_push_of_one_that_is_killed(system: PushSystem) -> None:
    system.control(load_s=1.0)
    leader = system.leader()
    with system.traffic() as seen:
        system.publish()
        system.server_in("loading")
        system.gateway_processes[leader].kill()
        system.gateway = system.gateways[1 - leader]
        system.until_led_by(1 - leader)
        system.replace_gateway(leader)
        wait_until(lambda: system.served(system.newest))
    system.check(seen)


@pytest.mark.long
def test_a_gateway_that_hung_in_a_push_does_not_undo_a_rollback(system: PushSystem) -> None:
    """When it wakes up, servers wait for their slot in its push."""
    served = system.publish(wait=True)
    system.control(load_s=1.0)
    leader = system.leader()
    hung, system.gateway = system.gateways[leader], system.gateways[1 - leader]
    with system.traffic() as seen:
        system.publish()
        system.server_in("loading")
        wait_until(
            lambda: [each["state"] for each in system.results(system.newest).values()].count("prepared")
        )
        system.gateway_processes[leader].send_signal(signal.SIGSTOP)
        try:
            system.until_led_by(1 - leader)
            system.control()
            body = {"to": served, "hold": False}
            system.gateway.post("/admin/policies/rollback?wait=false", body, key=ADMIN_KEY)
            wait_until(lambda: system.served(served))
        finally:
            system.gateway_processes[leader].send_signal(signal.SIGCONT)
        wait_until(lambda: hung.get("/admin/policies/serving", key=ADMIN_KEY).json()["target"] == served)
        answered = len(seen.heard)
        wait_until(lambda: len(seen.heard) > answered + 10)  # meanwhile late requests would have their effect
    system.check(seen, served)


@pytest.mark.long
def test_a_gateway_without_redis_leaves_its_push_to_another_one(system: PushSystem) -> None:
    system.until_led_by(system.leader())
    if system.leader() != 0:  # only gateway 0 has a link to Redis
        system.gateway_processes[1].send_signal(signal.SIGSTOP)
        system.until_led_by(0)
        system.gateway_processes[1].send_signal(signal.SIGCONT)
    system.control(load_s=1.0)
    system.gateway = system.gateways[1]
    with system.traffic() as seen:
        system.publish()
        system.server_in("loading")
        system.redis_link.cut()
        system.until_led_by(1)
        system.redis_link.mend()
        wait_until(lambda: system.served(system.newest))
    system.check(seen)


@pytest.mark.long
def test_pushes_and_rollbacks_through_two_gateways_end_on_one_version(system: PushSystem) -> None:
    first = system.publish(wait=True)
    one, other = system.gateways
    with system.traffic() as seen:
        for _ in range(4):
            system.gateway = one
            system.publish()
            body = {"to": first, "hold": False}
            reply = other.post("/admin/policies/rollback?wait=false", body, key=ADMIN_KEY)
            assert reply.status_code in (200, 202)
        wait_until(lambda: system.served(first))
    system.check(seen, first)
    assert max(system.plan()["admissible"]) == first, "no version that was rolled back answers calls"


# Rollout servers


@pytest.mark.parametrize(
    "moment",
    [pytest.param("fetch", marks=pytest.mark.long), "load", pytest.param("proof", marks=pytest.mark.long)],
)
def test_a_server_that_dies_takes_the_version_when_it_is_back(system: PushSystem, moment: str) -> None:
    if moment == "fetch":
        system.source.flowing.clear()
    system.control(**{"load": {"load_s": 1.0}, "proof": {"checksum_s": 1.0}}.get(moment, {}))
    with system.traffic() as seen:
        system.publish()
        victim = system.server_in("preparing" if moment == "fetch" else "loading")
        system.servers[victim].kill()
        system.source.flowing.set()
        wait_until(lambda: system.served(system.newest))
        states = {name: result["state"] for name, result in system.results(system.newest).items()}
        assert states[f"r{victim}"] == "unavailable"
        system.replace_server(victim)
    system.check(seen)


@pytest.mark.parametrize("hangs", ["server", pytest.param("engine", marks=pytest.mark.long)])
def test_a_server_or_engine_that_hangs_in_a_load_takes_the_version_when_it_goes_on(
    system: PushSystem, hangs: str
) -> None:
    system.control(load_s=1.0)
    with system.traffic() as seen:
        system.publish()
        victim = system.server_in("loading")
        process = system.engine_of(victim) if hangs == "engine" else system.servers[victim].process
        process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: system.served(system.newest))
        finally:
            process.send_signal(signal.SIGCONT)
    system.check(seen)


@pytest.mark.parametrize("to", [False, True])
@pytest.mark.long
def test_a_server_that_is_cut_off_takes_the_version_when_it_is_reached_again(
    system: PushSystem, to: bool
) -> None:
    """Packets are dropped on the way back to the gateways, or both ways."""
    system.control(load_s=1.0)
    with system.traffic() as seen:
        system.publish()
        wait_until(lambda: system.result_of(1).get("state") == "loading")
        system.cut_off(to=to)
        wait_until(lambda: system.served(system.newest))
        system.heal()
    system.check(seen)


@pytest.mark.parametrize("moment", ["fetch", "load", "proof"])
@pytest.mark.long
def test_gateways_know_what_a_server_serves_when_a_push_times_out(system: PushSystem, moment: str) -> None:
    """Each part of a push takes longer than the timeout, at its moment."""
    late = PUSH_TIMEOUT_S * 1.3
    if moment == "fetch":
        system.source.flowing.clear()
    system.control(**{"load": {"load_s": late}, "proof": {"checksum_s": late}}.get(moment, {}))
    with system.traffic() as seen, disagreements(system) as disagreed:
        system.publish()
        if moment == "fetch":
            wait_until(lambda: "not prepared within" in (system.result_of(1).get("error") or ""))
            system.source.flowing.set()
        wait_until(lambda: system.served(system.newest))
    bound_s = AGREES_WITHIN_S + AND_LOOKS * disagreed.longest_look_s
    assert max(disagreed.longest_s.values()) < bound_s, (disagreed.longest_s, disagreed.longest_look_s)
    system.check(seen)


# Canaries


@pytest.mark.parametrize("fault", ["server dies", "numbers are missing"])
@pytest.mark.long
def test_a_canary_that_cannot_be_judged_well_is_rolled_back(system: PushSystem, fault: str) -> None:
    """No session ends, so there is no reward to compare; the server's death makes its calls errors."""
    served = system.publish(wait=True)
    gates = {"max_reward_drop": None} if fault == "server dies" else {"deadline_s": 3.0}
    body = {"share": 0.3, "gates": gates | {"min_groups": 1000, "max_length_change": None}}
    system.gateway.post("/admin/policies/hold", key=ADMIN_KEY)
    version = system.publish()
    path = f"/admin/policies/{version}/canary"
    (name,) = system.gateway.post(path, body, key=ADMIN_KEY).json()["servers"]

    def state() -> str:
        reply = system.gateway.get(path, key=ADMIN_KEY)
        return str(reply.json().get("state"))  # a connection to Redis may have to be opened again

    wait_until(lambda: state() == "open")
    with system.traffic() as seen:
        if fault == "server dies":
            wait_until(lambda: len(seen.heard) > 16)
            system.servers[int(name[1:])].kill()
        wait_until(lambda: state() == "rolled_back")
        if fault == "server dies":
            system.replace_server(int(name[1:]))
    system.check(seen, served)
    system.gateway.post("/admin/policies/release", key=ADMIN_KEY)


# Files


@pytest.mark.long
def test_a_fetch_that_is_cut_off_goes_on_where_it_broke(system: PushSystem) -> None:
    system.source.flowing.clear()
    with system.traffic() as seen:
        system.publish()
        weights = f"v{system.newest:08d}/model.safetensors"
        wait_until(lambda: system.source.asked[weights] > 3)
        system.source.flowing.set()
        wait_until(lambda: system.served(system.newest))
    system.check(seen)


@pytest.mark.long
def test_a_chunk_that_arrives_broken_is_fetched_again(system: PushSystem) -> None:
    system.source.spoiled = 1  # a file that arrives broken twice is refused
    with system.traffic() as seen:
        system.publish(wait=True)
    assert system.source.spoiled == 0
    system.check(seen)
    assert {each["state"] for each in system.results(system.newest).values()} == {"proved"}


@pytest.mark.long
def test_files_that_are_broken_are_refused_and_the_next_version_is_served(system: PushSystem) -> None:
    served = system.newest
    system.source.spoiled = 10**6
    with system.traffic() as seen:
        system.publish()
        push = system.until("failed")
        assert "SHA-256" in push["error"]
        assert system.versions() == [served] * 3
        system.source.spoiled = 0
        system.newest -= 1
        shutil.rmtree(system.directory / "policies" / f"v{served + 1:08d}")
        assert system.publish(wait=True) == served + 1, "the number is free again"
    system.check(seen)


@pytest.mark.parametrize("fault", ["another base", "base removed meanwhile"])
@pytest.mark.long
def test_a_server_whose_base_does_not_fit_fetches_the_whole_version(system: PushSystem, fault: str) -> None:
    system.publish(wait=True)
    (base,) = (system.directory / "weights" / "r1").glob(f"v{system.newest:08d}-*")
    if fault == "another base":
        (base / "model.safetensors").write_bytes((system.directory / "model/model.safetensors").read_bytes())
    else:
        system.source.flowing.clear()
    with system.traffic() as seen:
        version = system.publish(changes=True)
        if fault == "base removed meanwhile":
            wait_until(lambda: system.source.asked[f"v{version:08d}/model.safetensors.delta"] >= 3)
            shutil.rmtree(base)
            system.source.flowing.set()
        wait_until(lambda: system.served(version))
    assert system.source.asked[f"v{version:08d}/model.safetensors"] == 1, "the others fetched the changes"
    system.check(seen)


@pytest.mark.long
def test_a_server_whose_disk_is_full_takes_the_version_when_there_is_room(system: PushSystem) -> None:
    server = system.servers[1]
    limit_files(server.process, SHORT)
    with system.traffic() as seen:
        system.publish(wait=True)
        assert "File too large" in system.result_of(1)["error"]
        limit_files(server.process)
    system.check(seen)
    assert not list(system.directory.glob("weights/*/*.part"))
