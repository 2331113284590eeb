"""prime-rl's orchestrator updates the rollout servers of a gateway, which then serves what they have."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from rollout_queue.contract.published_policy import MANIFEST
from tests.support.gateway.deployment import Deploy, Deployment
from tests.support.gateway.running import ADMIN_KEY

TOKENS = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}


def on_all(deployed: Deployment, path: str, body: Any = None) -> list[Any]:
    """Call each rollout server at the same time, as the orchestrator does."""

    def call(url: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=300)

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(call, [server.url for server in deployed.servers]))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    return [answer.json() for answer in answers]


def without_manifest(directory: Path, name: str) -> Path:
    given = directory.rename(directory.with_name(name))
    (given / MANIFEST).unlink()
    return given


def test_weights_that_all_servers_are_given_are_served_by_their_gateway(deploy: Deploy) -> None:
    deployed = deploy(2)
    for step in (4, 7):
        given = without_manifest(deployed.write(step), f"step_{step}")
        on_all(deployed, "/pause?mode=keep&clear_cache=false")
        body = {"weight_dir": str(given)}
        assert on_all(deployed, "/update_weights", body) == [{"status": "ok", "version": step}] * 2
        on_all(deployed, "/resume")
        assert deployed.plan()["serving"] == step
        reply = deployed.gateway.post("/inference/v1/generate", TOKENS)
        (choice,) = reply.json()["choices"]
        assert [span["version"] for span in choice["versions"]] == [step]
        assert reply.headers["x-weir-policy-version"] == str(step)
        shutil.rmtree(given)  # the servers have their own


def test_an_adapter_that_a_server_is_given_is_a_policy_of_its_own(deploy: Deploy) -> None:
    deployed = deploy(1, lora={"target_modules": ["embed_tokens"], "max_rank": 1})
    given = without_manifest(deployed.write_adapter(3, "mine"), "step_3")
    body = {"lora_name": "mine", "lora_path": str(given)}
    assert on_all(deployed, "/load_lora_adapter", body) == [{"status": "ok", "version": 3}]
    reply = deployed.gateway.post("/inference/v1/generate", TOKENS | {"model": "policy:mine"})
    assert reply.json()["choices"][0]["versions"][0]["version"] == 3
