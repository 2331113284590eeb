"""A server that starts, or comes back, serves what the fleet serves before it says that it is ready."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tests.rollout_server.conftest import House, make_house, until

GATEWAY = "http://gateway:8000"
REGISTER = f"{GATEWAY}/admin/rollout_servers"


def joining(directory: Path, policy: dict[str, Any] | None, **settings: Any) -> House:
    house = make_house(directory, gateway_url=GATEWAY, **settings)
    say(house, policy)
    return house


def say(house: House, policy: dict[str, Any] | None) -> None:
    house.outside.answers[REGISTER] = httpx.Response(200, json={"id": "rollout-0", "policy": policy})


def named(version: int, directory: Path) -> dict[str, Any]:
    return {"version": version, "location": directory.as_uri(), "manifest_sha256": None, "state": "serving"}


async def until_status(house: House, **wanted: Any) -> None:
    async with asyncio.timeout(5):
        while not wanted.items() <= (await house.status()).items():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_engine_boots_right_into_the_fleets_policy(tmp_path: Path) -> None:
    house = joining(tmp_path, None, admin_keys=["key"])
    house.http.headers["x-api-key"] = "key"
    say(house, named(7, house.policy(7)))
    await house.server.open()
    await house.until_ready()
    assert [policy.version for policy in house.engine.boots] == [7]
    assert (await house.http.get("/ready")).status_code == 200
    first = house.outside.requests[0]
    assert first.headers["authorization"] == "Bearer key"
    assert json.loads(first.content) == {
        "url": "http://127.0.0.1:8100",
        "engine_url": "http://127.0.0.1:30000",
        "id": "rollout-0",
    }
    await house.server.close()


async def test_a_server_that_cannot_fetch_the_policy_is_not_ready_until_it_can(tmp_path: Path) -> None:
    house = joining(tmp_path, None)
    directory = house.policy(7)
    (directory / "STABLE").unlink()
    say(house, named(7, directory))
    await house.server.open()
    await house.until_ready()
    assert (await house.status())["state"] == "loading"
    ready = await house.http.get("/ready")
    assert ready.status_code == 503
    assert "version 7" in ready.json()["error"]["message"]
    (directory / "STABLE").touch()
    await until_status(house, state="ready", version=7)
    await house.server.close()


async def test_a_gateway_that_is_down_is_tolerated_and_heard_later(tmp_path: Path) -> None:
    house = joining(tmp_path, None)
    answer = house.outside.answers.pop(REGISTER)
    await house.server.open()
    await until_status(house, state="ready", version=0)
    house.outside.answers[REGISTER] = answer
    say(house, named(3, house.policy(3)))
    await until_status(house, state="ready", version=3)
    await house.server.close()


async def test_a_missed_push_is_made_up_for_at_a_restart(tmp_path: Path) -> None:
    house = joining(tmp_path, None, register_every_s=60)
    await house.server.open()
    await house.until_ready()
    say(house, named(4, house.policy(4)))
    await house.kill_engine()
    await until_status(house, state="ready", version=4)
    assert house.engine.boots[-1].version == 4
    await house.server.close()


async def test_the_gateways_old_version_does_not_undo_a_push_that_still_runs(tmp_path: Path) -> None:
    house = joining(tmp_path, None)
    say(house, named(1, house.policy(1)))
    await house.server.open()
    await house.until_ready()
    await house.reload(2, house.policy(2))
    before = len(house.outside.requests)
    await until(lambda: len(house.outside.requests) >= before + 3)
    assert (await house.status())["version"] == 2
    await house.server.close()


async def test_a_missed_rollback_is_made_up_for_once_things_have_settled(tmp_path: Path) -> None:
    house = joining(tmp_path, None, settle_s=0.0)
    say(house, named(2, house.policy(2)))
    await house.server.open()
    await house.until_ready()
    say(house, named(1, house.policy(1)))
    await until_status(house, state="ready", version=1)
    await house.server.close()


async def test_draining_is_said_and_taken_back(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    await house.server.open()
    await house.until_ready()
    drained = (await house.http.post("/drain")).json()
    assert (drained["state"], drained["running"], drained["waiting"]) == ("draining", 2, 1)
    assert (await house.http.get("/ready")).status_code == 503
    assert (await house.http.post("/resume")).json()["state"] == "ready"
    await asyncio.wait_for(house.server.close(), 5)


async def test_a_server_that_is_told_to_end_tells_the_gateway_and_lets_its_calls_end(tmp_path: Path) -> None:
    house = joining(tmp_path, None, register_every_s=60, drain_timeout_s=5)
    await house.server.open()
    await house.until_ready()
    told = len(house.outside.requests)
    leaving = asyncio.create_task(house.server.leave())
    await until(lambda: len(house.outside.requests) > told)
    assert (await house.status())["state"] == "draining", "when the gateway asks"
    assert (await house.http.post("/resume")).json()["state"] == "draining", "it is too late"
    await until(lambda: house.engine.calls.count("/v1/loads") >= 4)
    assert not leaving.done()
    house.engine.running = 0
    await asyncio.wait_for(leaving, 5)
    assert house.engine.process is not None
    assert not house.engine.process.exited
    await house.server.close()
    assert house.engine.process.exited


async def test_a_server_that_is_told_to_end_while_it_loads_lets_the_held_calls_go_on(tmp_path: Path) -> None:
    house = make_house(tmp_path, drain_timeout_s=5)
    await house.server.open()
    await house.until_ready()
    house.engine.load_gate.clear()
    loading = asyncio.create_task(house.reload(1, house.policy(1)))
    await until(lambda: "/update_weights_from_disk" in house.engine.calls)
    house.engine.running = 0
    leaving = asyncio.create_task(house.server.leave())
    await asyncio.sleep(0)
    assert (await house.status())["state"] == "draining"
    assert not leaving.done()
    house.engine.load_gate.set()
    assert (await loading).status_code == 200
    await asyncio.wait_for(leaving, 5)
    assert not house.engine.paused
    await house.server.close()
