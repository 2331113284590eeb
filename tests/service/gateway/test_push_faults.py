"""Bad days around a push, with gateways and rollout servers in this process, while calls go on.

After each, no call has failed, every recorded token has the version that sampled it, the audit finds nothing,
and the fleet ends on one version (`four_ends`). `tests/process/gateway` has the days of real processes.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.gateway.deployment import Deploy, Deployment, Traffic, gateway_thread, traffic
from tests.support.gateway.four_ends import check_four_ends
from tests.support.gateway.links import Link, link
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.rollout_server.weights import WEIGHTS
from tests.support.serving import Served
from tests.support.waiting import wait_until

CALLS_PER_S = 8.0


@dataclass
class Pair:
    """Two gateways with two rollout servers. The first one drives pushes, as long as it can."""

    deployment: Deployment
    served: Served
    redis_link: Link
    """The path of the first gateway to Redis."""
    first: RunningGateway
    other: RunningGateway

    def load_slowly(self) -> None:
        for server in self.deployment.servers:
            server.control(load_s=1.0)

    def rollback(self, gateway: RunningGateway, to: int) -> None:
        reply = gateway.post("/admin/policies/rollback?wait=false", {"to": to, "hold": False}, key=ADMIN_KEY)
        assert reply.status_code in (200, 202), reply.text

    def until_served(self, version: int) -> None:
        def served() -> bool:
            plan = self.deployment.plan()
            return bool(plan["serving"] == version and plan["push"]["state"] == "serving")

        wait_until(served)

    def until_loading(self, version: int) -> int:
        """Wait until a server loads the version; return its index."""

        def loading() -> list[str]:
            results = self.deployment.results(version)
            return [name for name, result in results.items() if result["state"] == "loading"]

        return int(wait_until(loading)[0][1:])

    def traffic(self, *gateways: RunningGateway) -> Any:
        return traffic(*(gateways or (self.first, self.other)), per_s=CALLS_PER_S)

    def check(self, seen: Traffic, version: int) -> None:
        check_four_ends(self.deployment, seen, version)


@pytest.fixture
def pair(own_backends: Backends, deploy: Deploy) -> Iterator[Pair]:
    settings: dict[str, Any] = {"push_timeout_s": 2.0, "engine_wait_s": 60.0}
    with ExitStack() as stack:
        host, database = own_backends.redis_url.removeprefix("redis://").split("/")
        path = stack.enter_context(link(f"http://{host}"))
        url = f"{path.url.replace('http:', 'redis:')}/{database}"
        own_backends.clear(None)
        served, first = stack.enter_context(gateway_thread(own_backends, redis_url=url, **settings))
        deployment = deploy(2, gateway=first)
        deployment.announce(1)
        deployment.until("serving")
        _, other = stack.enter_context(gateway_thread(own_backends, **settings))
        wait_until(lambda: other.server_versions() == {"r0": 1, "r1": 1})
        yield Pair(deployment, served, path, first, other)


def test_a_gateway_that_hung_in_a_push_does_not_undo_a_rollback(pair: Pair) -> None:
    pair.load_slowly()
    pair.deployment.gateway = pair.other
    with pair.traffic(pair.other) as seen:
        pair.deployment.announce(2)
        pair.until_loading(2)
        pair.served.suspend()
        try:
            pair.rollback(pair.other, 1)
            pair.until_served(1)
        finally:
            pair.served.resume()
        wait_until(lambda: pair.first.get("/admin/policies/serving", key=ADMIN_KEY).json()["target"] == 1)
        answered = len(seen.heard)
        wait_until(lambda: len(seen.heard) > answered + 10)  # meanwhile late requests would have their effect
    pair.check(seen, 1)


def test_a_gateway_without_redis_leaves_its_push_to_another_one(pair: Pair) -> None:
    pair.load_slowly()
    pair.deployment.gateway = pair.other
    with pair.traffic() as seen:
        pair.deployment.announce(2)
        pair.until_loading(2)
        pair.redis_link.cut()
        pair.until_served(2)
        pair.redis_link.mend()
    pair.check(seen, 2)


def test_pushes_and_rollbacks_through_two_gateways_end_on_one_version(pair: Pair) -> None:
    with pair.traffic() as seen:
        for version in range(2, 6):
            pair.deployment.announce(version)
            pair.rollback(pair.other, 1)
        pair.until_served(1)
    pair.check(seen, 1)
    assert max(pair.deployment.plan()["admissible"]) == 1, "no version that was rolled back answers calls"


def test_a_server_that_hangs_while_it_takes_a_version_has_it_when_it_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.policies.server_reload.ABORT_TIMEOUT_S", 1.0)
    pair.load_slowly()
    with pair.traffic() as seen:
        pair.deployment.announce(2)
        server = pair.deployment.servers[pair.until_loading(2)]
        server.suspend()
        try:
            pair.until_served(2)
        finally:
            server.resume()
    pair.check(seen, 2)


def test_files_that_are_broken_are_refused_and_the_next_version_is_served(pair: Pair) -> None:
    weights = pair.deployment.write(2) / WEIGHTS
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pair.traffic() as seen:
        pair.deployment.announce(2)
        push = pair.deployment.until("failed")
        assert "SHA-256" in push["error"]
        assert pair.deployment.versions() == [1, 1]
        weights.write_bytes(sound)
        pair.deployment.announce(2)  # the number is free again
        pair.until_served(2)
    pair.check(seen, 2)
