"""A canary on the real stack: two real engines, a version that the trainer made, and one that is spoilt."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.rollout_server.processes import running
from tests.support.rollout_server.weights import publish
from tests.support.system.real_system import ADMIN_KEY, System, second_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

NOISE = 0.1
"""Added to weights whose standard deviation is 0.02."""
MOST_GROUPS = 200


@pytest.fixture
def two_servers(system: System, tmp_path: Path) -> Iterator[System]:
    """The system with a second rollout server and a paused trainer."""
    name = "rollout-second"
    given = second_server(system.settings, system.stack.gateway_url, tmp_path, name)
    with running(tmp_path, given, ADMIN_KEY):
        wait_until(lambda: states(system).count("ready") == 2, 300)
        yield system
        system.request("POST", "/resume", {}, key=ADMIN_KEY, url=system.stack.trainer_url)
        admin(system, "POST", "/release")
    system.request("DELETE", f"/admin/rollout_servers/{name}", key=ADMIN_KEY)


def states(system: System) -> list[str]:
    return [server["state"] for server in system.get("/admin/rollout_servers", key=ADMIN_KEY)["data"]]


def admin(system: System, method: str, path: str, body: Any = None) -> Any:
    return system.request(method, f"/admin/policies{path}", body, key=ADMIN_KEY)


def canary_of(system: System, version: int) -> Any:
    return admin(system, "GET", f"/{version}/canary").raise_for_status().json()


def push_of(system: System) -> Any:
    return admin(system, "GET", "/serving").json()["push"]


def play_until_ended(system: System, version: int) -> Any:
    """Open a canary, and play groups until it has ended. Returns it with its numbers."""
    reply = admin(system, "POST", f"/{version}/canary", {"share": 0.5})
    assert reply.status_code == 200, reply.text
    wait_until(lambda: canary_of(system, version)["state"] == "open", 120)
    for _ in range(MOST_GROUPS):
        if canary_of(system, version)["state"] != "open":
            break
        tickets = system.post("/groups", {"size": 2})["sessions"]
        for place, ticket in enumerate(tickets):
            system.say(ticket, "tell me")
            ending = {"status": "completed", "reward": float(place)}
            system.post(f"/sessions/{ticket['session_id']}/finish", ending)
    canary = canary_of(system, version)
    print(json.dumps(canary, indent=1))
    return canary


def spoil(policy: Path, target: Path, version: int) -> None:
    """Publish the policy's weights with noise, as another version."""
    shutil.copytree(policy, target)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor + NOISE * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in weights.items()
    }
    save_file(noisy, target / "model.safetensors", {"format": "pt"})
    publish(target, version)


def test_a_trained_version_is_promoted_and_a_spoilt_one_is_rolled_back(two_servers: System) -> None:
    system = two_servers
    assert admin(system, "POST", "/hold").status_code == 200
    before = admin(system, "GET", "").json()["data"][-1]["version"]
    system.train_one_group()

    def published() -> list[Any]:
        listed = admin(system, "GET", "").json()["data"]
        return [each for each in listed if each["version"] > before]

    wait_until(lambda: bool(published()), 120)
    system.request("POST", "/pause", {}, key=ADMIN_KEY, url=system.stack.trainer_url)
    good = published()[-1]
    canary = play_until_ended(system, good["version"])
    assert (canary["state"], canary["groups"] >= 10) == ("promoted", True), canary
    assert {each["state"] for each in canary["gates"]} == {"holds"}
    wait_until(lambda: push_of(system)["state"] == "serving", 120)
    assert system.serving() == good["version"]

    number = good["version"] + 1
    spoilt = system.settings.run_dir.absolute() / "policies" / "spoilt"
    spoil(Path(good["location"].removeprefix("file://")), spoilt, number)
    body = {"version": number, "location": spoilt.as_uri()}
    assert admin(system, "POST", "", body).json()["state"] == "held"
    canary = play_until_ended(system, number)
    assert (canary["state"], canary["groups"] < 10) == ("rolled_back", True), canary
    assert {each["gate"]: each["state"] for each in canary["gates"]}["kl"] == "broken"
    wait_until(lambda: push_of(system)["state"] == "serving", 120)
    assert system.serving() == good["version"]
