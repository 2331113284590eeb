"""No call fails while servers join and leave, or while a trainer has the memory of their engines."""

import time
from typing import Any

import httpx
import pytest

from rollout_queue import clock
from tests.support.gateway.deployment import Deploy, ready, traffic
from tests.support.gateway.running import ADMIN_KEY
from tests.support.rollout_server.in_process import ServerThread
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

RELEASED_S = 5
"""Longer than the silence (3 s) after which the gateway gives an engine up."""
WATCHES_PER_S = 4
"""How often the gateway looks for silent engines. Of a longer leap of time, it takes that it stood still."""


def asked(server: ServerThread, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    reply = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply


def release(server: ServerThread, for_s: float = 60.0) -> None:
    asked(server, "/memory/release", holder="trainer", for_s=for_s)


def resume(server: ServerThread) -> None:
    asked(server, "/memory/resume", holder="trainer")


def test_calls_to_the_only_server_wait_for_its_memory(deploy: Deploy) -> None:
    turned = TurnedClock()
    with clock.using(turned):
        deployment = deploy(1, memory="shared")
    (server,) = deployment.servers
    deployment.announce(1)
    deployment.until("serving")
    with traffic(deployment.gateway, per_s=20.0) as seen:
        wait_until(lambda: len(seen.sessions) > 5)
        release(server)
        before = len(seen.sessions)
        for _ in range(RELEASED_S * WATCHES_PER_S):
            turned.turn(1 / WATCHES_PER_S)
            time.sleep(0.05)  # the gateway looks
        wait_until(lambda: len(seen.sessions) > before + 5)
        resume(server)
        after = len(seen.sessions)
        wait_until(lambda: len(seen.sessions) > after + 5)
    assert set(seen.statuses) == {200}
    assert seen.versions() == {1}
    assert "start 2 follows" not in server.log.read_text(), "its engine has not died"


@pytest.mark.long
def test_calls_go_to_the_other_server_meanwhile(deploy: Deploy) -> None:
    deployment = deploy(2, memory="shared")
    released, other = deployment.servers
    release(released)
    wait_until(lambda: ready(deployment.gateway) == 1)
    with traffic(deployment.gateway, per_s=20.0) as seen:
        wait_until(lambda: len(seen.sessions) > 40)
    assert set(seen.statuses) == {200}
    assert set(seen.engines()) == {"r1"}
    resume(released)
    wait_until(lambda: ready(deployment.gateway) == 2)
    assert "engine is dead" not in released.log.read_text() + other.log.read_text()


@pytest.mark.long
def test_a_push_reaches_a_server_without_its_memory_when_that_is_back(deploy: Deploy) -> None:
    deployment = deploy(2, memory="shared", max_unavailable=1.0)
    release(deployment.servers[0])
    with traffic(deployment.gateway, per_s=10.0) as seen:
        deployment.announce(1)
        wait_until(lambda: deployment.versions() == [0, 1])
        wait_until(lambda: deployment.results(1)["r0"]["state"] == "loading")
        assert deployment.plan()["push"]["state"] == "pushing"
        resume(deployment.servers[0])
        deployment.until("serving")
    assert deployment.versions() == [1, 1]
    assert set(seen.statuses) == {200}


def test_a_trainer_that_is_killed_costs_no_call(deploy: Deploy) -> None:
    """Nobody resumes: the time for which the memory was given away ends."""
    deployment = deploy(1, memory="shared")
    with traffic(deployment.gateway, per_s=10.0) as seen:
        release(deployment.servers[0], for_s=1.0)
        log = deployment.servers[0].log
        wait_until(lambda: "did not give the engine's memory back" in log.read_text())
        wait_until(lambda: ready(deployment.gateway) == 1)
    assert set(seen.statuses) == {200}


def test_servers_join_and_leave_by_themselves_while_calls_go_on(deploy: Deploy) -> None:
    deployment = deploy(2, engine_wait_s=120.0)  # the machine may be busy
    deployment.announce(1)
    deployment.until("serving")
    gateway = deployment.gateway
    with traffic(gateway, per_s=10.0) as seen:
        added = deploy(1, gateway=gateway, first=2)
        wait_until(lambda: ready(gateway) == 3)
        assert added.versions() == [1], "it has loaded the served version before it gets calls"
        wait_until(lambda: added.servers[0].answers)
        deployment.servers[0].leave()
        added.servers[0].kill()
        wait_until(lambda: ready(gateway) == 1)
    assert set(seen.statuses) == {200}
    assert len(list(seen.turns())) == len(seen.sessions)
    placement = gateway.admin("GET", "/status").json()["placement"]
    assert sum(placement["placed"].values()) >= len(seen.sessions)
    assert placement["waiting"] == 0
