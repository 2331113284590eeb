"""Adapters as versions of the policy, as policies of their own, and as weights that a user's loop publishes.

Each rollout server has an engine double, whose answers say which adapter gave them.
"""

from array import array
from typing import Any

import pytest

from rollout_queue.trainer_commands import LoggedCommand, Published, Result, SaveForSampler
from tests.support.gateway.canaries import EVEN_ODDS, begin, play_until_ended, state_of
from tests.support.gateway.deployment import Deploy, Deployment, traffic
from tests.support.gateway.scripted_trainer import result_of, scripted_trainer
from tests.support.gateway.tinker_loop import SamplingLoop
from tests.support.waiting import wait_until

LORA = {"max_rank": 4, "target_modules": ["embed_tokens"]}


def serve(deployment: Deployment, version: int) -> None:
    deployment.announce(version, deployment.write_adapter(version).as_uri())
    deployment.until("serving")


def publish(deployment: Deployment, name: str, made: int, **more: Any) -> Any:
    location = deployment.write_adapter(made, name).as_uri()
    return deployment.gateway.admin("POST", "/adapters", {"name": name, "location": location, **more})


def location_of(deployment: Deployment, name: str, made: int) -> str:
    """Where `publish` has put the files."""
    return (deployment.directory / "policies" / f"{name}v{made}").as_uri()


def asked(
    deployment: Deployment, model: str = "policy", session: dict[str, Any] | None = None
) -> tuple[int, str, Any]:
    """One call: its status, its answer or the code of its error, and its turn."""
    gateway = deployment.gateway
    session = session or gateway.session()
    reply = gateway.chat(session=session, model=model)
    if reply.status_code != 200:
        return reply.status_code, reply.json()["error"]["code"], None
    return 200, reply.json()["choices"][0]["message"]["content"], gateway.turns(session)[-1]


def check_answer(deployment: Deployment, model: str, said: str, version: int) -> None:
    status, answer, turn = asked(deployment, model)
    assert (status, answer.startswith(said)) == (200, True), answer
    assert [span["version"] for span in turn["versions"]] == [version]


def published(deployment: Deployment) -> Any:
    return deployment.gateway.admin("GET", "/adapters").json()["data"]


def has(deployment: Deployment, name: str) -> list[list[str]]:
    return [each["servers"] for each in published(deployment) if each["name"] == name]


# Versions of the policy


def test_calls_go_on_while_an_adapter_is_pushed_and_each_version_is_called_by_its_name(
    deploy: Deploy,
) -> None:
    deployment = deploy(2, lora=LORA)
    check_answer(deployment, "policy", "hello", 0)
    with traffic(deployment.gateway, per_s=20.0) as seen:
        for version in (1, 2):
            serve(deployment, version)
    assert set(seen.statuses) == {200}
    assert seen.versions() <= {0, 1, 2}
    assert deployment.versions() == [2, 2]
    assert {result["paused_s"] for result in deployment.results(2).values()} == {0.0}
    check_answer(deployment, "policy", "hello from v00000002", 2)
    for version, said in enumerate(("hello", "hello from v00000001", "hello from v00000002")):
        check_answer(deployment, f"policy@{version}", said, version)
    assert asked(deployment, "policy@3")[0] == 404


def test_a_server_whose_engine_starts_again_loses_no_call(deploy: Deploy) -> None:
    """The new engine does not have the adapter that calls name until it is loaded again."""
    deployment = deploy(2, lora=LORA)
    serve(deployment, 1)
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
    deployment.announce(1, deployment.write_adapter(1).as_uri())
    push = deployment.until("failed")
    assert "rollout_server.lora is not set" in push["error"]
    assert deployment.versions() == [0, 0]
    wait_until(lambda: deployment.gateway.admin("GET", "/policies/1").status_code == 404)
    assert deployment.announce(1, deployment.write(7).as_uri())["version"] == 1


@pytest.mark.parametrize(
    ("scores", "ends"),
    [pytest.param({}, "promoted", marks=pytest.mark.long), ({"0": -4.0, "1": -1.0}, "rolled_back")],
)
def test_an_adapter_may_be_a_canary(deploy: Deploy, scores: dict[str, float], ends: str) -> None:
    deployment = deploy(2, lora=LORA, canary=EVEN_ODDS)
    for server in deployment.servers:
        server.control(scores=scores)
    begin(deployment, 1, location=deployment.write_adapter(1).as_uri())
    play_until_ended(deployment, 1)
    assert state_of(deployment, 1) == ends


# Policies of their own


def test_several_adapters_answer_beside_the_policy_each_under_its_own_name(deploy: Deploy) -> None:
    deployment = deploy(2, lora=LORA)
    for name, version in (("math", 1), ("math", 2), ("code", 1)):
        reply = publish(deployment, name, version)
        assert (reply.status_code, reply.json()["version"]) == (200, version), reply.text
        results = {result["server"]: result["ok"] for result in reply.json()["results"]}
        assert results == {"r0": True, "r1": True}
    check_answer(deployment, "policy", "hello", 0)
    check_answer(deployment, "policy:math", "hello from adapter-math-v00000002", 2)
    check_answer(deployment, "policy:math@1", "hello from adapter-math-v00000001", 1)
    check_answer(deployment, "policy:code@1", "hello from adapter-code-v00000001", 1)
    assert asked(deployment, "policy:math")[2]["verdict"]["code"] == "not_for_training"
    listed = [each["id"] for each in deployment.gateway.get("/v1/models").json()["data"]]
    assert listed == ["policy", "policy:code@1", "policy:math@1", "policy:math@2"]
    _, answer, turn = asked(deployment, "policy", deployment.gateway.session(policy="policy:math"))
    assert (answer.startswith("hello from adapter-math"), turn["versions"][0]["version"]) == (True, 2)


def test_a_name_and_a_version_name_one_adapter_for_ever(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA)
    assert publish(deployment, "math", 1).json()["model"] == "policy:math@1"
    again = {"name": "math", "version": 1, "location": location_of(deployment, "math", 1)}
    assert deployment.gateway.admin("POST", "/adapters", again).status_code == 200
    other = publish(deployment, "math", 2, version=1)
    assert (other.status_code, other.json()["error"]["type"]) == (409, "conflict_error")
    removed = deployment.gateway.admin("DELETE", "/adapters/math/1")
    assert removed.json() == {"name": "math", "version": 1, "removed": True}
    assert deployment.gateway.admin("POST", "/adapters", again).status_code == 409
    for model in ("policy:math@1", "policy:math"):
        assert asked(deployment, model)[:2] == (404, "model_not_found")
    kept = list((deployment.directory / "weights" / "r0").glob("adapter-*"))
    assert kept == [], "the files of a removed adapter stay on the server"
    assert publish(deployment, "user", 1, passing=True).status_code == 200
    assert deployment.gateway.admin("DELETE", "/adapters/user/1").status_code == 200
    wait_until(lambda: not published(deployment))
    again = {"name": "user", "version": 1, "location": location_of(deployment, "user", 1), "passing": True}
    assert deployment.gateway.admin("POST", "/adapters", again).status_code == 200, "this one comes back"


def test_an_adapter_that_no_server_takes_is_not_there(deploy: Deploy) -> None:
    deployment = deploy(1, lora={**LORA, "target_modules": ["q_proj"]})
    reply = publish(deployment, "math", 1)
    assert reply.status_code == 207
    (result,) = reply.json()["results"]
    assert (result["ok"], "target_modules" in result["error"]) == (False, True)
    assert asked(deployment, "policy:math")[0] == 404


def test_an_operators_adapters_make_no_room_for_others(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA, max_adapters=1)
    assert publish(deployment, "mine", 1).status_code == 200
    assert publish(deployment, "another", 1).status_code == 409
    assert publish(deployment, "passing", 1, passing=True).status_code == 409
    assert [each["name"] for each in published(deployment)] == ["mine"]


def test_engines_and_servers_that_start_have_the_adapters(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA)
    assert publish(deployment, "math", 1).status_code == 200
    server = deployment.servers[0]
    server.kill_engine()

    def loaded_again() -> bool:
        status = server.status()
        loaded = [each["policy"] for each in status["adapters"]]
        return bool(status["restarts"] == 1 and status["state"] == "ready" and "math" in loaded)

    wait_until(loaded_again)
    wait_until(lambda: has(deployment, "math") == [["r0"]])
    assert asked(deployment, "policy:math@1")[0] == 200
    server.kill()
    wait_until(lambda: deployment.gateway.get("/ready").status_code == 503)
    deploy(1, gateway=deployment.gateway, lora=LORA)
    wait_until(lambda: has(deployment, "math") == [["r0"]])
    assert asked(deployment, "policy:math@1")[0] == 200
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
    deployment.gateway.admin("POST", "/adapters", again)
    deployment.servers[0].resume()
    assert len(has(deployment, "math")) == 1


# Weights that a user's loop publishes


def publishing(deployment: Deployment, logged: LoggedCommand) -> Result:
    """As the trainer does: each SaveForSampler publishes an adapter that may make room for others."""
    if not isinstance(logged.command, SaveForSampler):
        return result_of(logged)
    name = logged.model_id.replace(":", ".")
    reply = publish(deployment, name, logged.number, version=logged.number, passing=True)
    assert reply.status_code == 200, reply.text
    return Published(name, logged.number, location_of(deployment, name, logged.number))


def said(deployment: Deployment, loop: SamplingLoop, sampler: str, number: int) -> str:
    loop.sampler = sampler
    made = loop.sample(number, [1, 2, 3], {"max_tokens": 64})
    return deployment.gateway.engine.tokenizer.decode(list(array("i", made.sequences[0].tokens)))


def test_more_snapshots_than_engines_hold_are_sampled_from(deploy: Deploy) -> None:
    """Shared weights are the newest for every sampler."""
    deployment = deploy(1, lora=LORA, max_adapters=2)
    loop = SamplingLoop(deployment.gateway, "policy")
    with scripted_trainer(deployment.gateway.redis) as trainer:
        trainer.result_of = lambda logged: publishing(deployment, logged)
        loop.start()
        samplers = []
        for number in (1, 2, 3, 4):
            saved = loop.done("save_weights_for_sampler", number, sampling_session_seq_id=number)
            samplers.append(saved["sampling_session_id"])
        assert [each["version"] for each in published(deployment)] == [3, 4], "there is room for two"
        for round_, number in enumerate((4, 1, 3, 2, 1)):
            text = said(deployment, loop, samplers[number - 1], round_)
            assert f"v{number:08d}" in text, (number, text)
        for number in (5, 6):
            loop.done("save_weights_for_sampler", number, sampling_session_seq_id=number, kind="inflight")
        for number in (5, 6):
            assert "v00000006" in said(deployment, loop, f"{loop.session_id}:sample:{number}", number)
