"""Weights come from a real S3-compatible store: whole or as changes, over connections that break or hang."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_queue.contract.policies.policy import FileSpec, TensorSpec, sha256_of
from tests.support.object_store import BUCKET, ENVIRONMENT, CuttingProxy, StoreProcess, object_store
from tests.support.rollout_server.harness import Harness, make_harness
from tests.support.rollout_server.weights import WEIGHTS, float32_tensors, write_model, write_safetensors
from tests.support.waiting import wait_until_async
from trainer_service.storage.policy_store import PolicyStore

SHAPES = {"model.embed_tokens.weight": [512, 256], "model.norm.weight": [256], "lm_head.weight": [512, 256]}
SIZE = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with object_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.fixture
def proxy(shared_store: StoreProcess) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(shared_store.port)
    yield proxy
    proxy.close()


async def started(directory: Path, url: str, **settings: Any) -> Harness:
    """A rollout server that may fetch from the directory's own prefix in the store."""
    write_model(directory / "model", float32_tensors(1.0, SHAPES))
    harness = make_harness(
        directory,
        locations=[f"s3://{BUCKET}/{directory.name}"],
        object_store={"endpoint_url": url, "region": "us-east-1"},
        **{"fetch_timeout_s": 30.0, **settings},
    )
    await harness.server.open()
    await harness.until_ready()
    return harness


@pytest.fixture
async def harness(tmp_path: Path, proxy: CuttingProxy) -> AsyncIterator[Harness]:
    harness = await started(tmp_path, proxy.url)
    yield harness
    await harness.http.aclose()
    await harness.server.close()


def write_version(harness: Harness, version: int, anchor_every: int | None = None) -> Path:
    """A version as the trainer writes it, whose weights are random numbers; about 1 MB."""
    store = PolicyStore(harness.directory / "written", harness.directory / "model", 9, anchor_every)

    def write(directory: Path) -> list[FileSpec]:
        random = np.random.default_rng(1)
        tensors = {
            name: ("F32", shape, random.standard_normal(shape).astype("<f4").tobytes())
            for name, shape in SHAPES.items()
        }
        tensors["model.norm.weight"] = ("F32", [256], np.full(256, version, "<f4").tobytes())
        path = directory / WEIGHTS
        write_safetensors(path, tensors)
        specs = [TensorSpec(name, shape, dtype) for name, (dtype, shape, _) in tensors.items()]
        return [FileSpec(path.name, path.stat().st_size, sha256_of(path), specs)]

    return store.write(version, version, write)


def offer(harness: Harness, store: StoreProcess, version: int, anchor_every: int | None = None) -> str:
    directory = write_version(harness, version, anchor_every)
    return store.put_version(directory, f"{harness.directory.name}/{directory.name}")


def kept(harness: Harness, version: int) -> bytes:
    """The weights that the server has of a version."""
    found = next(harness.directory.glob(f"weights/own/v{version:08d}-*/{WEIGHTS}"))
    return found.read_bytes()


async def test_a_version_is_fetched_from_the_store(harness: Harness, shared_store: StoreProcess) -> None:
    location = offer(harness, shared_store, 1)
    answer = await harness.reload(1, location)
    assert answer.status_code == 200, answer.text
    assert (await harness.status())["version"] == 1
    assert kept(harness, 1) == (harness.directory / "written/v00000001" / WEIGHTS).read_bytes()


async def test_a_broken_connection_goes_on_where_it_broke(
    harness: Harness, shared_store: StoreProcess, proxy: CuttingProxy
) -> None:
    location = offer(harness, shared_store, 1)
    proxy.cut_after = SIZE // 3
    answer = await harness.reload(1, location)
    assert answer.status_code == 200, answer.text
    ranges = [int(each.split("bytes=")[1].rstrip("-")) for each in proxy.requests if "bytes=" in each]
    assert len(ranges) == 3
    assert all(SIZE // 4 < after - before < SIZE // 2 for before, after in zip([0, *ranges], ranges, strict=False))
    assert kept(harness, 1) == (harness.directory / "written/v00000001" / WEIGHTS).read_bytes()


async def test_a_store_that_sends_nothing_more_is_503(
    harness: Harness, shared_store: StoreProcess, proxy: CuttingProxy
) -> None:
    location = offer(harness, shared_store, 1)
    proxy.cut_after = 0
    answer = await harness.reload(1, location)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "storage_unavailable")
    assert len(proxy.requests) <= 6


async def test_a_corrupt_object_is_422_and_the_old_version_serves(
    harness: Harness, shared_store: StoreProcess
) -> None:
    location = offer(harness, shared_store, 1)
    key = f"{harness.directory.name}/v00000001/{WEIGHTS}"
    raw = shared_store.get(key)
    shared_store.put(key, raw[:-1] + bytes([raw[-1] ^ 1]))
    answer = await harness.reload(1, location)
    assert (answer.status_code, "SHA-256" in answer.text) == (422, True), answer.text
    assert (await harness.status())["version"] == 0
    shared_store.put(key, raw + b"x")
    answer = await harness.reload(1, location)
    assert (answer.status_code, "is longer than" in answer.text) == (422, True), answer.text
    shared_store.put(key, raw)
    assert (await harness.reload(1, location)).status_code == 200


@pytest.mark.parametrize("name", [WEIGHTS, "manifest.json", "STABLE"])
async def test_a_missing_object_is_422(harness: Harness, shared_store: StoreProcess, name: str) -> None:
    location = offer(harness, shared_store, 1)
    shared_store.client.delete_object(Bucket=BUCKET, Key=f"{harness.directory.name}/v00000001/{name}")
    answer = await harness.reload(1, location)
    assert (answer.status_code, name in answer.text, "NoSuchKey" in answer.text) == (422, True, True)
    assert (await harness.status())["version"] == 0


async def test_a_server_with_the_base_fetches_the_changes(
    harness: Harness, shared_store: StoreProcess, proxy: CuttingProxy
) -> None:
    for version in (1, 2):
        location = offer(harness, shared_store, version, anchor_every=10)
        answer = await harness.reload(version, location)
        assert answer.status_code == 200, answer.text
    fetched = [line.split()[1] for line in proxy.requests if "v00000002" in line]
    assert [path for path in fetched if path.endswith((".delta", ".safetensors"))] == [
        f"/{BUCKET}/{harness.directory.name}/v00000002/{WEIGHTS}.delta"
    ]
    assert kept(harness, 2) == (harness.directory / "written/v00000002" / WEIGHTS).read_bytes()
