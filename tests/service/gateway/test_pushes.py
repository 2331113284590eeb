"""Pushes to rollout servers: spread of the calls, slow servers, sources of the files.

Faults are in `test_push_faults`.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from rollout_queue.contract.published_policy import FileSpec, TensorSpec, sha256_of
from tests.support.gateway.deployment import Deploy, traffic
from tests.support.object_store import BUCKET, CuttingProxy, object_store, set_environment
from tests.support.rollout_server.weights import SHAPES, WEIGHTS, float32_tensors, write_safetensors
from tests.support.serving import serving
from tests.support.waiting import wait_until
from trainer_service.storage.policy_store import PolicyStore

CALLS, AT_ONCE = 60, 7


def test_calls_spread_over_all_other_servers_while_each_one_loads(deploy: Deploy) -> None:
    deployment = deploy(4)
    shares: list[list[int]] = []
    """How many calls each server got while one of them loaded, the one with the fewest first."""
    loading: list[int] = []
    """How many servers loaded, whenever one began to."""

    def load() -> Callable[[], bool]:
        """Takes as long as so many calls."""
        before = [server.answers for server in deployment.servers]
        loading.append(len(loading) - len(shares) + 1)

        def over() -> bool:
            got = [server.answers - old for server, old in zip(deployment.servers, before, strict=True)]
            if sum(got) < CALLS:
                return False
            shares.append(sorted(got))
            return True

        return over

    with traffic(deployment.gateway, per_s=100.0, at_once=AT_ONCE) as seen:
        for server in deployment.servers:
            server.control(load=load)
        deployment.announce(1)
        push = deployment.until("serving")
    assert set(seen.statuses) == {200}
    assert push["capacity"] <= 0.75
    assert loading == [1, 1, 1, 1]
    assert len(shares) == 4
    assert len(seen.sessions) >= 4 * CALLS, "one server after the other"
    even, deviation = CALLS / 3, math.sqrt(CALLS * 1 / 3 * 2 / 3)  # of calls that choose a server at random
    for share in shares:
        assert share[0] <= AT_ONCE, "calls that were on their way when the load began"
        assert even - 5 * deviation < share[1] <= share[3] < even + 5 * deviation, shares
    assert set(seen.engines()) == {"r0", "r1", "r2", "r3"}
    assert seen.versions() == {0, 1}


@pytest.mark.parametrize("slow", ["load_s", pytest.param("checksum_s", marks=pytest.mark.long)])
def test_servers_slower_than_the_timeout_are_waited_for_and_stay_in_rotation(
    deploy: Deploy, slow: str
) -> None:
    deployment = deploy(2, push_timeout_s=1.0)
    for server in deployment.servers:
        server.control(**{slow: 1.7})
    with traffic(deployment.gateway, per_s=10.0) as seen:
        deployment.announce(1)
        deployment.until("serving")
    assert set(seen.statuses) == {200}
    assert deployment.versions() == [1, 1]


def files_of(directory: Path, before: Callable[[str], Awaitable[None]]) -> Starlette:
    """A source of the files in a directory. It awaits `before` with the name of each file."""

    async def file(request: Request) -> Response:
        version, name = request.path_params["version"], request.path_params["name"]
        await before(name)
        return FileResponse(directory / version / name)

    return Starlette(routes=[Route("/{version}/{name}", file)])


@pytest.mark.long
def test_a_fetch_slower_than_the_timeout_is_ended_and_the_next_version_is_served(
    deploy: Deploy, tmp_path: Path
) -> None:
    """The source of the files hangs in the middle of a version."""
    gate = Event()

    async def hang(name: str) -> None:
        while name.endswith(".safetensors") and not gate.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.02)

    with serving(files_of(tmp_path / "policies", hang)) as source:
        deployment = deploy(2, push_timeout_s=0.5, locations=source)
        deployment.write(1)
        with traffic(deployment.gateway, per_s=10.0) as seen:
            deployment.announce(1, f"{source}/v00000001")
            push = deployment.until("failed")
            assert deployment.versions() == [0, 0]
            gate.set()
            assert "version 1 was not prepared within 0.5 s; the server serves version 0" in push["error"]
            deployment.announce(2)
            deployment.until("serving")
        assert set(seen.statuses) == {200}
        assert deployment.versions() == [2, 2]


@pytest.mark.long
def test_servers_fetch_from_each_other_so_that_few_read_from_the_trainer(
    deploy: Deploy, tmp_path: Path
) -> None:
    """At most one server reads from a source at once: the trainer, and each server that has the files."""
    asked: list[str] = []

    async def slow(name: str) -> None:
        asked.append(name)
        await asyncio.sleep(0.3)  # a slow trainer, so that the servers' own sources are free before it

    with serving(files_of(tmp_path / "policies", slow)) as source:
        deployment = deploy(5, fetch_fan_out=1, max_unavailable=1.0, locations=source)
        deployment.write(1)
        deployment.announce(1, f"{source}/v00000001")
        deployment.until("serving")
        assert deployment.versions() == [1] * 5
        assert asked.count("manifest.json") >= 5, "each server trusts the trainer's manifest only"
        assert asked.count("model.safetensors") < 5, "the second server finds the first one"
        weights = [
            (path, path.read_bytes()) for path in tmp_path.glob("weights/*/v00000001-*/model.safetensors")
        ]
        assert len(weights) == 5
        assert {raw for _, raw in weights} == {
            (tmp_path / "policies/v00000001/model.safetensors").read_bytes()
        }


@pytest.mark.long
def test_few_read_changes_from_the_trainer_at_once(deploy: Deploy, tmp_path: Path) -> None:
    """Every server has the base, and one at most reads from the trainer."""
    reading: list[str] = []
    most: list[int] = []

    async def slow(name: str) -> None:
        if "safetensors" in name:
            reading.append(name)
            most.append(len(reading))
            await asyncio.sleep(0.3)  # a slow trainer, from which others would read meanwhile
            reading.remove(name)
            asked[name] += 1

    asked: Counter[str] = Counter()
    with serving(files_of(tmp_path / "policies", slow)) as source:
        deployment = deploy(5, fetch_fan_out=1, max_unavailable=1.0, locations=source)
        store = PolicyStore(tmp_path / "policies", tmp_path / "model", keep=10, anchor_every=3)
        for version in (1, 2):
            store.write(version, version, weights_of(version))
            asked.clear()
            deployment.announce(version, f"{source}/v{version:08d}")
            wait_until(lambda: deployment.plan()["push"]["version"] == version)  # noqa: B023
            deployment.until("serving")
        assert deployment.versions() == [2] * 5
    assert max(most) == 1
    assert set(asked) == {f"{WEIGHTS}.delta"}
    assert asked.total() < 5, "the second server finds the first one"


def weights_of(version: int) -> Callable[[Path], list[FileSpec]]:
    def write(directory: Path) -> list[FileSpec]:
        path = directory / WEIGHTS
        write_safetensors(path, float32_tensors(1.0 + version / 1000))
        tensors = [TensorSpec(name, shape, "F32") for name, shape in SHAPES.items()]
        return [FileSpec(path.name, path.stat().st_size, sha256_of(path), tensors)]

    return write


@pytest.mark.long
def test_all_servers_read_from_an_object_store_at_once(
    deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server waits for its turn, and the store gives each of them all files."""
    set_environment(monkeypatch, tmp_path)
    with object_store() as store, closing(CuttingProxy(store.port)) as proxy:
        monkeypatch.setenv("WEIR_ROLLOUT_SERVER__OBJECT_STORE__ENDPOINT_URL", proxy.url)
        deployment = deploy(3, fetch_fan_out=1, max_unavailable=1.0, locations=f"s3://{BUCKET}/a")
        for path in deployment.write(1).iterdir():
            store.put(f"a/v00000001/{path.name}", path.read_bytes())
        proxy.cut_after, proxy.gate = 0, Event()
        deployment.announce(1, f"s3://{BUCKET}/a/v00000001")
        wait_until(lambda: proxy.open == 3)
        proxy.gate.set()
        deployment.until("serving")
        assert deployment.versions() == [1] * 3
        assert sum("model.safetensors" in line for line in proxy.requests) == 3


def test_a_newer_version_replaces_one_under_way_and_every_server_ends_on_it(deploy: Deploy) -> None:
    deployment = deploy(3)
    for server in deployment.servers:
        server.control(load_s=0.2)

    def begun() -> bool:
        """Whether a server loads the version, or has loaded it."""
        return any(each["state"] in ("loading", "proved") for each in deployment.results(version).values())

    with traffic(deployment.gateway, per_s=20.0) as seen:
        for version in range(1, 6):
            deployment.announce(version)
            wait_until(begun)
        deployment.until("serving")
    assert set(seen.statuses) == {200}
    assert deployment.versions() == [5, 5, 5]
    assert len(seen.versions()) > 2, "versions between the first and the last one are served, too"
    pushes = deployment.gateway.admin("GET", "/policies/pushes").json()["data"]
    assert [push["version"] for push in pushes] == [5, 4, 3, 2, 1]
    assert pushes[0]["state"] == "serving"
    assert "superseded" in {push["state"] for push in pushes[1:]}
