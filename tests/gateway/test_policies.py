"""Publishing a policy: numbers, the push to each server, and who is in rotation afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.gateway.conftest import ADMIN_KEY, Door
from tests.serving import serving


@dataclass
class FakeRolloutServer:
    """The control side of a rollout server: takes what it is told, or refuses."""

    version: int = 0
    refuse: bool = False
    state: str = "ready"
    reloads: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/status", self.status), Route("/reload", self.reload, methods=["POST"])]
        )

    async def status(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization", ""))
        return JSONResponse({"state": self.state, "version": self.version})

    async def reload(self, request: Request) -> Response:
        self.reloads.append(await request.json())
        if self.refuse:
            return JSONResponse({"error": {"message": "a tensor is missing"}}, 422)
        self.version = self.reloads[-1]["version"]
        return JSONResponse({"ok": True, "version": self.version, "paused_s": 0.01})


@pytest.fixture
def servers(door: Door) -> Iterator[list[FakeRolloutServer]]:
    fakes = [FakeRolloutServer(), FakeRolloutServer()]
    engine_url = door.get("/admin/rollout_servers", key=ADMIN_KEY).json()["data"][0]["engine_url"]
    door.call("DELETE", "/admin/rollout_servers/engine-0", key=ADMIN_KEY)
    with serving(fakes[0].app()) as one, serving(fakes[1].app()) as two:
        for index, url in enumerate((one, two)):
            body = {"id": f"r{index}", "url": url, "engine_url": engine_url}
            assert door.post("/admin/rollout_servers", body, key=ADMIN_KEY).status_code == 200
        yield fakes


def publish(door: Door, version: int | None, **fields: Any) -> Any:
    body = {"version": version, "location": f"file:///policies/{version}", **fields}
    return door.post("/admin/policies", body, key=ADMIN_KEY)


def test_registration_makes_the_first_version_known(door: Door, servers: list[FakeRolloutServer]) -> None:
    (record,) = door.get("/admin/policies", key=ADMIN_KEY).json()["data"]
    assert (record["version"], record["state"], record["location"]) == (0, "serving", None)
    assert servers[0].keys == {f"Bearer {ADMIN_KEY}"}


def test_a_push_reaches_every_server_and_reports_each(door: Door, servers: list[FakeRolloutServer]) -> None:
    reply = publish(door, 3, manifest_sha256="ab", step=9)
    assert reply.status_code == 200
    assert [(r["server"], r["ok"], r["version_served"]) for r in reply.json()["results"]] == [
        ("r0", True, 3),
        ("r1", True, 3),
    ]
    assert servers[1].reloads == [
        {"version": 3, "location": "file:///policies/3", "manifest_sha256": "ab", "force": False}
    ]
    assert door.get("/admin/status", key=ADMIN_KEY).json()["policy"]["serving"] == 3


def test_one_failure_is_207_and_the_failed_server_leaves_rotation(
    door: Door, servers: list[FakeRolloutServer]
) -> None:
    servers[0].refuse = True
    reply = publish(door, 3)
    assert reply.status_code == 207
    assert reply.json()["results"][0]["error"] == "a tensor is missing"
    session = door.session()
    for _ in range(4):
        door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
    turns = door.get(f"/sessions/{session['session_id']}").json()["turns"]
    assert {turn["engine"] for turn in turns} == {"r1"}


def test_when_all_fail_the_old_version_is_served_on(door: Door, servers: list[FakeRolloutServer]) -> None:
    for server in servers:
        server.refuse = True
    assert publish(door, 3).status_code == 207
    assert door.get("/admin/status", key=ADMIN_KEY).json()["policy"]["serving"] == 0
    assert door.chat().status_code == 200


def test_numbers_only_grow_and_name_one_content(door: Door, servers: list[FakeRolloutServer]) -> None:
    assert publish(door, 5).status_code == 200
    assert publish(door, 4).status_code == 409
    assert publish(door, 5, manifest_sha256="other").status_code == 409
    assert publish(door, 5).status_code == 200
    assert publish(door, None).json()["version"] == 6


def test_a_rollback_serves_the_old_version_under_its_own_number(
    door: Door, servers: list[FakeRolloutServer]
) -> None:
    publish(door, 1)
    publish(door, 2)
    assert door.post("/admin/policies/rollback", {"to": 1}, key=ADMIN_KEY).status_code == 200
    assert [server.version for server in servers] == [1, 1]
    assert servers[0].reloads[-1]["force"] is True
    states = {p["version"]: p["state"] for p in door.get("/admin/policies", key=ADMIN_KEY).json()["data"]}
    assert states == {0: "retired", 1: "serving", 2: "retired"}
    assert door.post("/admin/policies/9/promote", key=ADMIN_KEY).status_code == 404


def test_a_server_that_joins_hears_the_current_policy(door: Door, servers: list[FakeRolloutServer]) -> None:
    publish(door, 2, manifest_sha256="cd")
    late = FakeRolloutServer()
    with serving(late.app()) as url:
        body = {"id": "late", "url": url, "engine_url": url}
        told = door.post("/admin/rollout_servers", body, key=ADMIN_KEY).json()["policy"]
    assert (told["version"], told["location"], told["manifest_sha256"]) == (2, "file:///policies/2", "cd")


def test_a_client_key_publishes_nothing(door: Door) -> None:
    assert door.post("/admin/policies", {"location": "file:///x"}).status_code == 403
    assert door.post("/admin/policies", {"location": 7}, key=ADMIN_KEY).status_code == 400
