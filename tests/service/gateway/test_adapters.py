"""Versions that are adapters: calls name them at the engine, and one engine answers with several.

Each rollout server has an engine double, whose answers say which adapter gave them.
"""

from typing import Any

import pytest

from tests.support.gateway.deployment import Deploy, Deployment, traffic
from tests.support.gateway.running import ADMIN_KEY
from tests.support.waiting import wait_until

LORA = {"max_rank": 4, "target_modules": ["embed_tokens"]}


def announce(deployment: Deployment, version: int) -> Any:
    return deployment.announce(version, deployment.write_adapter(version).as_uri())


def asked(deployment: Deployment, model: str = "policy") -> tuple[int, str, list[int]]:
    """One call: its status, its answer, and the versions of its turn."""
    gateway = deployment.gateway
    session = gateway.session()
    reply = gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", model=model)
    if reply.status_code != 200:
        return reply.status_code, reply.text, []
    (turn,) = gateway.turns(session)
    said = reply.json()["choices"][0]["message"]["content"]
    return 200, said, [span["version"] for span in turn["versions"]]


def test_calls_go_on_while_an_adapter_is_pushed_and_are_answered_with_it_afterwards(deploy: Deploy) -> None:
    deployment = deploy(2, lora=LORA)
    assert asked(deployment)[1:] == ("hello", [0])
    with traffic(deployment.gateway, per_s=20.0) as seen:
        announce(deployment, 1)
        deployment.until("serving")
        announce(deployment, 2)
        deployment.until("serving")
    assert set(seen.statuses) == {200}
    assert seen.versions() <= {0, 1, 2}
    assert deployment.versions() == [2, 2]
    _, said, versions = asked(deployment)
    assert (said.startswith("hello from v00000002"), versions) == (True, [2])
    assert {result["paused_s"] for result in deployment.results(2).values()} == {0.0}


def test_one_server_answers_with_every_version_that_a_call_names(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA)
    for version in (1, 2):
        announce(deployment, version)
        deployment.until("serving")
    for version, said in ((0, "hello"), (1, "hello from v00000001"), (2, "hello from v00000002")):
        status, answer, versions = asked(deployment, f"policy@{version}")
        assert (status, answer.startswith(said), versions) == (200, True, [version])
    assert asked(deployment, "policy@3")[0] == 404


def test_a_server_whose_engine_starts_again_loses_no_call(deploy: Deploy) -> None:
    """The new engine does not have the adapter that calls name until it is loaded again."""
    deployment = deploy(2, lora=LORA)
    announce(deployment, 1)
    deployment.until("serving")
    with traffic(deployment.gateway, per_s=20.0) as seen:
        server = deployment.servers[0]
        server.kill_engine()

        def restarted() -> bool:
            status = server.status()
            return bool(status["restarts"] == 1 and status["state"] == "ready")

        wait_until(restarted)
    assert set(seen.statuses) == {200}
    assert seen.versions() == {1}


def test_servers_that_take_no_adapters_refuse_the_version_and_its_number_is_free_again(
    deploy: Deploy,
) -> None:
    deployment = deploy(2)
    announce(deployment, 1)
    push = deployment.until("failed")
    assert "rollout_server.lora is not set" in push["error"]
    assert deployment.versions() == [0, 0]
    assert deployment.announce(1, deployment.write(7).as_uri())["version"] == 1


@pytest.mark.parametrize(
    ("scores", "ends"),
    [pytest.param({}, "promoted", marks=pytest.mark.long), ({"0": -4.0, "1": -1.0}, "rolled_back")],
)
def test_an_adapter_may_be_a_canary(deploy: Deploy, scores: dict[str, float], ends: str) -> None:
    gates = {"share": 0.5, "min_groups": 3, "max_length_change": None, "max_reward_drop": None}
    deployment = deploy(2, lora=LORA, canary=gates)
    for server in deployment.servers:
        server.control(scores=scores)
    gateway = deployment.gateway
    gateway.post("/admin/policies/hold", {}, key=ADMIN_KEY)
    announce(deployment, 1)
    assert gateway.post("/admin/policies/1/canary", {}, key=ADMIN_KEY).status_code == 200

    def state() -> str:
        return str(gateway.get("/admin/policies/1/canary", key=ADMIN_KEY).json()["state"])

    wait_until(lambda: state() == "open")
    for _ in range(200):
        if state() != "open":
            break
        for ticket in gateway.post("/groups", {"size": 2}).json()["sessions"]:
            path = f"/sessions/{ticket['session_id']}"
            assert gateway.chat(path=f"{path}/v1/chat/completions").status_code == 200
            gateway.post(f"{path}/finish", {"status": "completed", "reward": 1.0})
    assert state() == ends
