"""Weights that a user's loop has published: each sampler samples from its own, however many there are."""

from array import array
from typing import Any

import pytest

from rollout_queue.commands.command import LoggedCommand, SaveForSampler
from rollout_queue.commands.result import Published, Result
from tests.support.gateway.deployment import Deploy, Deployment
from tests.support.gateway.running import ADMIN_KEY
from tests.support.gateway.scripted_trainer import result_of, scripted_trainer
from tests.support.gateway.tinker_loop import SamplingLoop
from tests.support.waiting import wait_until

LORA = {"max_rank": 4, "target_modules": ["embed_tokens"]}


def publishing(deployment: Deployment, logged: LoggedCommand) -> Result:
    """As the trainer does: each SaveForSampler publishes an adapter that may make room for others."""
    if not isinstance(logged.command, SaveForSampler):
        return result_of(logged)
    name = logged.model_id.replace(":", ".")
    location = deployment.write_adapter(logged.number, name).as_uri()
    body = {"name": name, "version": logged.number, "location": location, "passing": True}
    reply = deployment.gateway.post("/admin/adapters", body, key=ADMIN_KEY)
    assert reply.status_code == 200, reply.text
    return Published(name, logged.number, location)


def said(deployment: Deployment, loop: SamplingLoop, sampler: str, number: int) -> str:
    loop.sampler = sampler
    made = loop.sample(number, [1, 2, 3], {"max_tokens": 64})
    tokens = list(array("i", made.sequences[0].tokens))
    return deployment.gateway.engine.tokenizer.decode(tokens)


def test_more_snapshots_than_engines_hold_are_sampled_from(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA, max_adapters=2)
    loop = SamplingLoop(deployment.gateway, str(deployment.gateway.get("/v1/models").json()["data"][0]["id"]))
    with scripted_trainer(deployment.gateway.redis) as trainer:
        trainer.result_of = lambda logged: publishing(deployment, logged)
        loop.start()
        samplers = []
        for number in (1, 2, 3, 4):
            promise = loop.command("save_weights_for_sampler", number, sampling_session_seq_id=number).json()
            samplers.append(loop.poll(promise).json()["sampling_session_id"])
        page: Any = deployment.gateway.get("/admin/adapters", key=ADMIN_KEY).json()["data"]
        assert [each["version"] for each in page] == [3, 4], "there is room for two"
        for round_, number in enumerate((4, 1, 3, 2, 1)):
            text = said(deployment, loop, samplers[number - 1], round_)
            assert f"v{number:08d}" in text, (number, text)


def test_shared_weights_are_the_newest_for_every_sampler(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA)
    loop = SamplingLoop(deployment.gateway, "policy")
    with scripted_trainer(deployment.gateway.redis) as trainer:
        trainer.result_of = lambda logged: publishing(deployment, logged)
        loop.start()
        for number in (1, 2):
            promise = loop.command(
                "save_weights_for_sampler", number, sampling_session_seq_id=number, kind="inflight"
            ).json()
            assert "sampling_session_id" in loop.poll(promise).json()
        for number, sampler in enumerate(("1", "2")):
            assert "v00000002" in said(deployment, loop, f"{loop.session_id}:sample:{sampler}", number)


def test_an_operators_adapters_make_no_room(deploy: Deploy) -> None:
    deployment = deploy(1, lora=LORA, max_adapters=1)
    post = deployment.gateway.post
    location = deployment.write_adapter(1, "mine").as_uri()
    assert post("/admin/adapters", {"name": "mine", "location": location}, key=ADMIN_KEY).status_code == 200
    body = {"name": "other", "location": location, "passing": True}
    assert post("/admin/adapters", body, key=ADMIN_KEY).status_code == 409
    page = deployment.gateway.get("/admin/adapters", key=ADMIN_KEY).json()["data"]
    assert [each["name"] for each in page] == ["mine"]


@pytest.mark.parametrize("passing", [False, True])
def test_only_a_passing_adapter_comes_back_under_its_version(deploy: Deploy, passing: bool) -> None:
    deployment = deploy(1, lora=LORA)
    post = deployment.gateway.post
    body = {
        "name": "a",
        "version": 1,
        "location": deployment.write_adapter(1, "a").as_uri(),
        "passing": passing,
    }
    assert post("/admin/adapters", body, key=ADMIN_KEY).status_code == 200
    deployment.gateway.call("DELETE", "/admin/adapters/a/1", key=ADMIN_KEY)
    wait_until(lambda: not deployment.gateway.get("/admin/adapters", key=ADMIN_KEY).json()["data"])
    assert post("/admin/adapters", body, key=ADMIN_KEY).status_code == (200 if passing else 409)
