"""Weights come from a real S3-compatible store: whole or as changes, over connections that break or hang."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollout_queue.contract.published_policy import FileSpec, ObjectPrefix, TensorSpec, sha256_of
from rollout_queue.settings import ObjectStoreSettings
from tests.support.object_store import BUCKET, KEYS, CuttingProxy, RunningStore, object_store, set_environment
from tests.support.rollout_server.harness import Harness, make_harness
from tests.support.rollout_server.weights import WEIGHTS, float32_tensors, write_model, write_safetensors
from tests.support.waiting import wait_until_async
from trainer_service.publishing.places import ObjectStorePlace
from trainer_service.storage.policy_store import PolicyStore

SHAPES = {"model.embed_tokens.weight": [512, 256], "model.norm.weight": [256], "lm_head.weight": [512, 256]}
SIZE = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())

TIMEOUT_S = 6.0
"""A busy machine still gets an answer of the store within it."""


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    with object_store() as store:
        yield store


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_environment(monkeypatch, tmp_path)


@pytest.fixture
def proxy(shared_store: RunningStore) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(shared_store.port)
    yield proxy
    proxy.close()


def server_of(directory: Path, url: str, **settings: Any) -> Harness:
    """A rollout server that may fetch from the directory's own prefix in the store."""
    write_model(directory / "model", float32_tensors(1.0, SHAPES))
    return make_harness(
        directory,
        locations=[f"s3://{BUCKET}/{directory.name}", "s3://absent/policies"],
        object_store={"endpoint_url": url, "region": "us-east-1"},
        **{"fetch_timeout_s": 30.0, **settings},
    )


@pytest.fixture
async def harness(tmp_path: Path, proxy: CuttingProxy) -> AsyncIterator[Harness]:
    async with server_of(tmp_path, proxy.url).started() as harness:
        yield harness


@pytest.fixture
async def stopping_server(tmp_path: Path, proxy: CuttingProxy) -> AsyncIterator[Harness]:
    async with server_of(tmp_path, proxy.url, fetch_timeout_s=TIMEOUT_S).started() as harness:
        yield harness


def write_version(harness: Harness, version: int) -> PolicyStore:
    """Write a version as the trainer does. Its weights are random numbers, about 1 MB."""
    store = PolicyStore(harness.directory / "written", harness.directory / "model", 9)

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

    store.write(version, version, write)
    return store


def prefix(harness: Harness) -> ObjectPrefix:
    """Each test has its own."""
    return ObjectPrefix(BUCKET, harness.directory.name)


async def offer(harness: Harness, store: RunningStore, version: int) -> str:
    """Copy a version to the store, as the trainer does. Returns its location."""
    versions = write_version(harness, version)
    settings = ObjectStoreSettings(endpoint_url=store.url)
    place = ObjectStorePlace(versions, prefix(harness), settings, lambda: False)
    await asyncio.to_thread(place.offer, version)
    return place.location(version)


def written(harness: Harness, version: int) -> bytes:
    """The weights of a version as the trainer wrote them."""
    return (harness.directory / f"written/v{version:08d}" / WEIGHTS).read_bytes()


async def test_a_version_is_fetched_from_the_store(harness: Harness, shared_store: RunningStore) -> None:
    location = await offer(harness, shared_store, 1)
    answer = await harness.reload(1, location)
    assert answer.status_code == 200, answer.text
    assert (await harness.status())["version"] == 1
    assert harness.kept_weights(1) == written(harness, 1)


async def test_a_broken_connection_goes_on_where_it_broke(
    harness: Harness, shared_store: RunningStore, proxy: CuttingProxy
) -> None:
    location = await offer(harness, shared_store, 1)
    proxy.cut_after = SIZE // 3
    answer = await harness.reload(1, location)
    assert answer.status_code == 200, answer.text
    ranges = [int(each.split("bytes=")[1].rstrip("-")) for each in proxy.requests if "bytes=" in each]
    assert len(ranges) == 3
    assert all(
        SIZE // 4 < after - before < SIZE // 2 for before, after in zip([0, *ranges], ranges, strict=False)
    )
    assert harness.kept_weights(1) == written(harness, 1)


async def test_a_missing_object_is_422(harness: Harness, shared_store: RunningStore) -> None:
    location = await offer(harness, shared_store, 1)
    for name in (WEIGHTS, "manifest.json", "STABLE"):
        key = f"{harness.directory.name}/v00000001/{name}"
        content = shared_store.get(key)
        shared_store.client.delete_object(Bucket=BUCKET, Key=key)
        answer = await harness.reload(1, location)
        assert (answer.status_code, "NoSuchKey" in answer.text) == (422, True), name
        assert name in answer.text
        shared_store.put(key, content)
    assert (await harness.status())["version"] == 0


# A store that is away, or refuses


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[RunningStore]:
    with object_store() as store:
        yield store


@pytest.fixture
async def its_server(tmp_path: Path, own_store: RunningStore) -> AsyncIterator[Harness]:
    """A server that fetches from `own_store`."""
    async with server_of(tmp_path, own_store.url, fetch_timeout_s=TIMEOUT_S).started() as harness:
        yield harness


async def test_a_missing_bucket_is_503_because_the_store_may_be_the_wrong_one(harness: Harness) -> None:
    answer = await harness.reload(1, "s3://absent/policies/v00000001")
    assert (answer.status_code, "NoSuchBucket" in answer.text) == (503, True), answer.text


async def test_credentials_that_are_refused_are_503_until_they_are_mended(
    its_server: Harness, own_store: RunningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = await offer(its_server, own_store, 1)
    right = own_store.check_keys()
    for key, secret, reason in (
        ("a-secret", "a-secret", "InvalidAccessKeyId"),
        (right["AWS_ACCESS_KEY_ID"], "a-secret", "SignatureDoesNotMatch"),
        ("", "", "credentials"),
    ):
        for name, value in zip(KEYS, (key, secret), strict=True):
            monkeypatch.setenv(name, value)
        answer = await its_server.reload(1, location)
        assert (answer.status_code, reason in answer.text) == (503, True), answer.text
        assert "a-secret" not in answer.text
    lines = [f"{name.lower()} = {value}" for name, value in right.items()]
    (tmp_path / "credentials").write_text("\n".join(["[default]", *lines]))
    assert (await its_server.reload(1, location)).status_code == 200


async def test_a_store_that_is_down_or_hangs_is_503_until_it_is_back(
    its_server: Harness, own_store: RunningStore
) -> None:
    location = await offer(its_server, own_store, 1)
    own_store.kill()
    answer = await its_server.reload(1, location)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "storage_unavailable")
    assert (await its_server.status())["state"] == "ready"
    own_store.start()
    await offer(its_server, own_store, 1)
    own_store.hang()
    began_at = time.monotonic()
    answer = await its_server.reload(1, location)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "storage_unavailable")
    assert TIMEOUT_S <= time.monotonic() - began_at < 60.0
    own_store.go_on()
    assert (await its_server.reload(1, location)).status_code == 200


async def test_a_file_whose_bytes_stop_coming_goes_on_after_the_timeout_if_there_are_more(
    stopping_server: Harness, shared_store: RunningStore, proxy: CuttingProxy
) -> None:
    location = await offer(stopping_server, shared_store, 1)
    proxy.cut_after, proxy.gate = SIZE * 2 // 3, threading.Event()
    answer = await stopping_server.reload(1, location)
    assert answer.status_code == 200, answer.text


async def test_a_file_of_which_nothing_comes_for_the_whole_timeout_is_asked_for_once(
    stopping_server: Harness, shared_store: RunningStore, proxy: CuttingProxy
) -> None:
    location = await offer(stopping_server, shared_store, 1)
    proxy.cut_after, proxy.gate, proxy.only = 0, threading.Event(), WEIGHTS
    answer = await stopping_server.reload(1, location)
    assert answer.status_code == 503, answer.text
    assert sum(WEIGHTS in line for line in proxy.requests) == 1


async def test_a_reload_that_is_ended_leaves_no_connection_and_no_file(
    harness: Harness, shared_store: RunningStore, proxy: CuttingProxy
) -> None:
    location = await offer(harness, shared_store, 1)
    proxy.cut_after, proxy.gate = SIZE // 3, threading.Event()
    reload = asyncio.create_task(harness.reload(1, location, prepare=True))
    await wait_until_async(lambda: any(line.split()[1].endswith(WEIGHTS) for line in proxy.requests))
    answer = await asyncio.wait_for(harness.http.delete("/reload/1"), 300)
    assert answer.json()["aborted"]
    assert (await reload).json()["error"]["code"] == "reload_aborted"
    await wait_until_async(lambda: proxy.open == 0)
    await wait_until_async(lambda: not list(harness.own.iterdir()))
    assert not [each for each in threading.enumerate() if "fsspec" in each.name]
    proxy.cut_after = None
    assert (await harness.reload(1, location)).status_code == 200


async def test_files_come_from_the_peer_and_the_manifest_from_the_store(
    harness: Harness, shared_store: RunningStore, proxy: CuttingProxy
) -> None:
    location = await offer(harness, shared_store, 1)
    directory = harness.directory / "written/v00000001"
    digest = sha256_of(directory / "manifest.json")
    for path in directory.iterdir():
        url = f"http://r7:8100/weights/1/{digest}/{path.name}"
        harness.network.answers[url] = httpx.Response(200, content=path.read_bytes())
    answer = await harness.reload(1, location, manifest_sha256=digest, peer="http://r7:8100")
    assert answer.status_code == 200, answer.text
    assert {line.split()[1].rpartition("/")[2] for line in proxy.requests} == {"STABLE", "manifest.json"}
