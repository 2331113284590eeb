"""Bad days around a push, with real gateways, rollout servers and a Redis, while calls go on.

After each, no call has failed, every recorded token has the version that sampled it, the audit finds nothing,
and the fleet ends on one version (`four_ends`). In `tests/service/gateway`, gateways and servers are in one
process, and broken files, gateways that hang and rollbacks meet a push.
"""

import signal
from collections.abc import Iterator

import pytest

from rollout_queue.redis import key_names
from tests.support.gateway.disagreements import disagreements
from tests.support.gateway.push_system import PUSH_TIMEOUT_S, SHORT, PushSystem, limit_files, push_system
from tests.support.gateway.running import Backends
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


def test_a_failover_of_redis_that_loses_the_last_push_costs_no_call(system: PushSystem) -> None:
    """A replica is promoted that lacks the plan and the register of the last two pushes."""
    lost = (
        key_names.SERVING,
        key_names.POLICIES,
        key_names.RESERVED,
        key_names.SERVER_PUSHES,
        key_names.PUSHES,
    )
    redis = system.gateway.redis
    with system.traffic() as seen:
        system.publish(wait=True)
        lagged = {key: redis.dump(key) for key in lost}
        for _ in range(2):
            system.publish(wait=True)
        with redis.pipeline(transaction=True) as failover:
            failover.delete(*lost)
            for key, value in lagged.items():
                if value is not None:
                    failover.restore(key, 0, value)
            failover.execute()
        wait_until(lambda: system.served(system.newest))
        wait_until(lambda: redis.hexists(key_names.POLICIES, str(system.newest)))
        system.publish(wait=True)
    assert set(seen.statuses) == {200}
    system.check(seen)


@pytest.mark.long
@pytest.mark.parametrize("hangs", ["server", "engine"])
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
