"""Adapters that are policies of their own, on rollout servers with engine doubles."""

from typing import Any

import pytest

from tests.support.gateway.deployment import Deploy, Deployment
from tests.support.gateway.running import ADMIN_KEY
from tests.support.waiting import wait_until

LORA = {"max_rank": 4, "target_modules": ["embed_tokens"]}


def publish(deployment: Deployment, name: str, made: int, **more: Any) -> Any:
    location = deployment.write_adapter(made, name).as_uri()
    return deployment.gateway.post(
        "/admin/adapters", {"name": name, "location": location, **more}, key=ADMIN_KEY
    )


def asked(deployment: Deployment, model: str, session: dict[str, Any] | None = None) -> tuple[int, str, Any]:
    """One call: its status, its answer, and its turn."""
    gateway = deployment.gateway
    session = session or gateway.session()
    reply = gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", model=model)
    if reply.status_code != 200:
        return reply.status_code, reply.json()["error"]["code"], None
    return 200, reply.json()["choices"][0]["message"]["content"], gateway.turns(session)[-1]


def has(deployment: Deployment, name: str) -> list[list[str]]:
    page = deployment.gateway.get("/admin/adapters", key=ADMIN_KEY).json()["data"]
    return [each["servers"] for each in page if each["name"] == name]


def test_several_adapters_answer_beside_the_policy_each_under_its_own_name(deploy: Deploy) -> None:
    deployment = deploy(2, lora=LORA)
    for name, version in (("math", 1), ("math", 2), ("code", 1)):
        reply = publish(deployment, name, version)
        assert (reply.status_code, reply.json()["version"]) == (200, version), reply.text
        assert {result["server"]: result["ok"] for result in reply.json()["results"]} == {
            "r0": True,
            "r1": True,
        }
    expected = {
        "policy": ("hello", None),
        "policy:math": ("hello from adapter-math-v00000002", "policy:math@2"),
        "policy:math@1": ("hello from adapter-math-v00000001", "policy:math@1"),
        "policy:code@1": ("hello from adapter-code-v00000001", "policy:code@1"),
    }
    for model, (said, policy) in expected.items():
        status, answer, turn = asked(deployment, model)
        assert (status, answer.startswith(said)) == (200, True), answer
        if policy is not None:
            assert [span["version"] for span in turn["versions"]] == [int(policy[-1])]
            assert turn["verdict"]["code"] == "not_for_training"
    listed = [each["id"] for each in deployment.gateway.get("/v1/models").json()["data"]]
    assert listed == ["policy", "policy:code@1", "policy:math@1", "policy:math@2"]


def test_a_session_may_belong_to_an_adapter(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA)
    assert publish(deployment, "math", 1).status_code == 200
    session = deployment.gateway.session(policy="policy:math")
    status, answer, turn = asked(deployment, "policy", session)
    assert (status, answer.startswith("hello from adapter-math"), turn["versions"][0]["version"]) == (
        200,
        True,
        1,
    )


def test_a_name_and_a_version_name_one_adapter_for_ever(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA)
    first = publish(deployment, "math", 1)
    location = (deployment.directory / "policies" / "mathv1").as_uri()
    again = {"name": "math", "version": 1, "location": location}
    assert deployment.gateway.post("/admin/adapters", again, key=ADMIN_KEY).status_code == 200
    other = publish(deployment, "math", 2, version=1)
    assert (other.status_code, other.json()["error"]["type"]) == (409, "conflict_error")
    assert first.json()["model"] == "policy:math@1"
    removed = deployment.gateway.call("DELETE", "/admin/adapters/math/1", key=ADMIN_KEY)
    assert removed.json() == {"name": "math", "version": 1, "removed": True}
    assert deployment.gateway.post("/admin/adapters", again, key=ADMIN_KEY).status_code == 409
    assert asked(deployment, "policy:math@1")[:2] == (404, "model_not_found")
    assert asked(deployment, "policy:math")[:2] == (404, "model_not_found")
    kept = list((deployment.directory / "weights" / "r0").glob("adapter-*"))
    assert kept == [], "the files of a removed adapter stay on the server"


def test_an_adapter_that_no_server_takes_is_not_there(deploy: Deploy) -> None:
    deployment = deploy(1, lora={**LORA, "target_modules": ["q_proj"]})
    reply = publish(deployment, "math", 1)
    assert reply.status_code == 207
    (result,) = reply.json()["results"]
    assert (result["ok"], "target_modules" in result["error"]) == (False, True)
    assert asked(deployment, "policy:math")[0] == 404


@pytest.mark.long
def test_there_are_at_most_max_adapters(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA, max_adapters=1)
    assert publish(deployment, "math", 1).status_code == 200
    assert publish(deployment, "code", 1).status_code == 409


@pytest.mark.long
def test_adapters_come_back_with_an_engine_that_was_killed(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA)
    assert publish(deployment, "math", 1).status_code == 200
    deployment.servers[0].kill_engine()
    wait_until(lambda: has(deployment, "math") == [[]])
    wait_until(lambda: has(deployment, "math") == [["r0"]])
    assert asked(deployment, "policy:math@1")[0] == 200


def test_adapters_come_back_with_a_server_that_was_killed(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA)
    assert publish(deployment, "math", 1).status_code == 200
    deployment.servers[0].kill()
    wait_until(lambda: deployment.gateway.get("/ready").status_code == 503)
    deploy(1, gateway=deployment.gateway, lora=LORA)
    wait_until(lambda: has(deployment, "math") == [["r0"]])
    assert asked(deployment, "policy:math@1")[0] == 200


@pytest.mark.long
def test_a_server_that_joins_later_gets_the_adapters(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA)
    assert publish(deployment, "math", 1).status_code == 200
    deploy(1, gateway=deployment.gateway, lora=LORA, first=1)
    wait_until(lambda: has(deployment, "math") == [["r0", "r1"]])


@pytest.mark.long
def test_an_adapter_that_is_published_again_stays_if_no_server_answers(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA, push_timeout_s=10.0)
    assert publish(deployment, "math", 1).status_code == 200
    location = (deployment.directory / "policies" / "mathv1").as_uri()
    deployment.servers[0].suspend()
    deployment.gateway.http.timeout = 60
    again = {"name": "math", "version": 1, "location": location}
    deployment.gateway.post("/admin/adapters", again, key=ADMIN_KEY)
    deployment.servers[0].resume()
    assert len(has(deployment, "math")) == 1
