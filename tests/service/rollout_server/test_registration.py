"""A server that starts or comes back loads the fleet's version before it reports that it is ready."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx

from rollout_server.weights.weights_store import manifest_digest
from tests.support.rollout_server.harness import Harness, hastened, make_harness
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until_async

GATEWAY = "http://gateway:8000"
REGISTER = f"{GATEWAY}/admin/rollout_servers"


def joining(directory: Path, **settings: Any) -> Harness:
    """A server whose gateway serves no policy until it is told to."""
    harness = make_harness(directory, gateway_url=GATEWAY, **settings)
    say(harness, None)
    return harness


def say(harness: Harness, policy: dict[str, Any] | None) -> None:
    harness.network.answers[REGISTER] = httpx.Response(200, json={"id": "rollout-0", "policy": policy})


def named(version: int, directory: Path) -> dict[str, Any]:
    return {"version": version, "location": directory.as_uri(), "manifest_sha256": None, "state": "serving"}


async def until_told(harness: Harness, times: int) -> None:
    """Wait until the server has called its gateway so often again."""
    before = len(harness.network.requests)
    await wait_until_async(lambda: len(harness.network.requests) >= before + times)


async def until_status(harness: Harness, **wanted: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not wanted.items() <= (await harness.status()).items():  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)  # lets the server's tasks run


async def test_the_first_start_loads_the_fleets_policy(tmp_path: Path) -> None:
    harness = joining(tmp_path, admin_keys=["key"])
    harness.http.headers["x-api-key"] = "key"
    say(harness, named(7, harness.policy(7)))
    async with harness.started():
        assert [policy.version for policy in harness.engine.boots] == [7]
        assert (await harness.http.get("/ready")).status_code == 200
        first = harness.network.requests[0]
        assert first.headers["authorization"] == "Bearer key"
        assert json.loads(first.content) == {
            "url": "http://127.0.0.1:8100",
            "engine_url": "http://127.0.0.1:30000",
            "id": f"{socket.gethostname()}-8100",
            "process": (await harness.status())["process"],
            "forget_after_s": 600.0,
        }


async def test_a_server_that_cannot_fetch_the_policy_is_not_ready_until_it_can(tmp_path: Path) -> None:
    harness = joining(tmp_path)
    directory = harness.policy(7)
    (directory / "STABLE").unlink()
    say(harness, named(7, directory))
    async with harness.started():
        assert (await harness.status())["state"] == "loading"
        ready = await harness.http.get("/ready")
        assert ready.status_code == 503
        assert "version 7" in ready.json()["error"]["message"]
        (directory / "STABLE").touch()
        await until_status(harness, state="ready", version=7)


async def test_a_server_starts_without_its_gateway_and_follows_it_later(tmp_path: Path) -> None:
    harness = joining(tmp_path, settle_s=0.0)
    answer = harness.network.answers.pop(REGISTER)
    await harness.server.open()
    await until_status(harness, state="ready", version=0)
    harness.network.answers[REGISTER] = answer
    say(harness, named(3, harness.policy(3)))
    await until_status(harness, state="ready", version=3)
    await harness.server.close()


async def test_a_restarted_engine_loads_a_version_whose_push_it_missed(tmp_path: Path) -> None:
    harness = joining(tmp_path, register_every_s=60)
    async with harness.started():
        say(harness, named(4, harness.policy(4)))
        await harness.kill_engine()
        await until_status(harness, state="ready", version=4)
        assert harness.engine.boots[-1].version == 4


async def test_the_gateways_old_version_does_not_undo_a_push_that_still_runs(tmp_path: Path) -> None:
    """A newer version is left to its push."""
    harness = joining(tmp_path)
    policies = {version: harness.policy(version) for version in (1, 2, 3)}
    say(harness, named(1, policies[1]))
    async with harness.started():
        await harness.reload(2, policies[2])
        for announced in (1, 3):
            say(harness, named(announced, policies[announced]))
            await until_told(harness, 3)
            assert (await harness.status())["version"] == 2
            assert "v00000003" not in harness.kept()


class NamedOverHttp:
    """A gateway that names version 7, and the HTTP server that has its files."""

    URL = "http://127.0.0.1:8200/weights/7"

    def __init__(self, harness: Harness) -> None:
        self.directory = harness.policy(7)
        self.gate = asyncio.Event()
        """The files of weights are sent when this event is set."""
        self.registrations = self.fetches = 0
        self.weights_status = 200
        policy = named(7, self.directory) | {"location": self.URL}
        policy["manifest_sha256"] = manifest_digest((self.directory / "manifest.json").read_bytes())
        self._registered = httpx.Response(200, json={"id": "rollout-0", "policy": policy})
        harness.network.source = self.handle

    async def handle(self, request: httpx.Request) -> httpx.Response:
        url = str(request.url)
        if url == REGISTER:
            self.registrations += 1
            return httpx.Response(200, content=self._registered.content)
        name = url.removeprefix(f"{self.URL}/")
        if name.endswith(".safetensors"):
            self.fetches += 1
            await self.gate.wait()
            return httpx.Response(self.weights_status, content=(self.directory / name).read_bytes())
        return httpx.Response(200, content=(self.directory / name).read_bytes())


async def test_a_version_that_is_fetched_without_a_push_holds_up_nothing_and_can_be_ended(
    tmp_path: Path,
) -> None:
    harness = joining(tmp_path, settle_s=0.0, memory="shared")
    async with harness.started():
        source = NamedOverHttp(harness)
        await wait_until_async(lambda: source.fetches == 1)
        async with asyncio.timeout(PATIENCE_S):
            released = await harness.http.post("/memory/release", json={"holder": "trainer", "for_s": 60})
            assert released.status_code == 200
            await harness.http.post("/memory/resume", json={"holder": "trainer"})
        told = source.registrations
        await wait_until_async(lambda: source.registrations >= told + 3)
        assert (await harness.http.delete("/reload/7")).json()["aborted"]
        source.gate.set()
        await until_status(harness, state="ready", version=7)


async def test_a_version_that_was_refused_as_broken_is_not_fetched_again(tmp_path: Path) -> None:
    harness = joining(tmp_path, settle_s=0.0)
    async with harness.started():
        source = NamedOverHttp(harness)
        source.weights_status = 404
        source.gate.set()
        await wait_until_async(lambda: source.fetches == 1)
        told = source.registrations
        await wait_until_async(lambda: source.registrations >= told + 10)
        assert source.fetches == 1
        assert (await harness.status())["state"] == "ready"


async def test_a_server_follows_a_rollback_that_it_missed(tmp_path: Path) -> None:
    harness = joining(tmp_path, settle_s=0.0)
    say(harness, named(2, harness.policy(2)))
    async with harness.started():
        say(harness, named(1, harness.policy(1)))
        await until_status(harness, state="ready", version=1)


async def test_a_failure_that_nobody_foresaw_ends_neither_the_registration_nor_the_engine(
    tmp_path: Path,
) -> None:
    harness = joining(tmp_path)
    async with harness.started():

        async def fails(_: httpx.Request) -> httpx.Response:
            raise RuntimeError("a fault of the program")

        harness.network.source = fails
        await until_told(harness, 1)
        await harness.kill_engine()
        await wait_until_async(lambda: harness.server.engine.restarts >= 2)
        harness.network.source = None
        await harness.until_ready()
        await until_told(harness, 4)


async def test_a_drained_server_says_so_and_can_resume(harness: Harness) -> None:
    drained = (await harness.http.post("/drain")).json()
    assert (drained["state"], drained["running"], drained["waiting"]) == ("draining", 2, 1)
    assert (await harness.http.get("/ready")).status_code == 503
    assert (await harness.http.post("/resume")).json()["state"] == "ready"


async def test_a_server_that_is_told_to_end_tells_the_gateway_and_lets_its_calls_end(tmp_path: Path) -> None:
    harness = joining(tmp_path, register_every_s=60, drain_timeout_s=2 * PATIENCE_S)
    await harness.server.open()
    await harness.until_ready()
    told = len(harness.network.requests)
    leaving = asyncio.create_task(harness.server.leave())
    await wait_until_async(lambda: len(harness.network.requests) > told)
    assert (await harness.status())["state"] == "draining", "while it still answers the gateway"
    assert (await harness.http.post("/resume")).json()["state"] == "draining", (
        "a server that ends cannot resume"
    )
    await wait_until_async(lambda: harness.engine.calls.count("/v1/loads") >= 4)
    assert not leaving.done()
    harness.engine.running = 0
    await asyncio.wait_for(leaving, PATIENCE_S)
    assert harness.engine.process is not None
    assert not harness.engine.process.exited
    await harness.server.close()
    assert harness.engine.process.exited


async def test_a_server_that_is_told_to_end_while_it_loads_lets_the_held_calls_go_on(
    turned: TurnedClock, tmp_path: Path
) -> None:
    harness = make_harness(tmp_path, drain_timeout_s=PATIENCE_S)
    async with harness.started():
        harness.engine.load_gate.clear()
        loading = asyncio.create_task(harness.reload(1, harness.policy(1)))
        await wait_until_async(lambda: "/update_weights_from_disk" in harness.engine.calls)
        harness.engine.running = 0
        leaving = asyncio.create_task(harness.server.leave())
        await wait_until_async(lambda: harness.server.engine.state == "draining")
        assert (await harness.status())["state"] == "draining"
        for _ in range(20):
            turned.turn(0.2)
            await asyncio.sleep(0.001)  # a server whose engine is idle would have left by now
        assert not leaving.done()
        harness.engine.load_gate.set()
        assert (await loading).status_code == 200
        await hastened(turned, asyncio.wait_for(leaving, PATIENCE_S))
        assert not harness.engine.paused
