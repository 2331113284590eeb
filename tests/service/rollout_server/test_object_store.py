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

from rollout_queue.contract.policies.object_prefix import ObjectPrefix
from rollout_queue.contract.policies.policy import FileSpec, TensorSpec, sha256_of
from rollout_queue.settings import ObjectStoreSettings
from tests.support.object_store import (
    BUCKET,
    KEYS,
    CuttingProxy,
    RunningStore,
    object_store,
    set_environment,
)
from tests.support.rollout_server.harness import Harness, make_harness
from tests.support.rollout_server.weights import WEIGHTS, float32_tensors, write_model, write_safetensors
from tests.support.waiting import wait_until_async
from trainer_service.publishing.places import ObjectStorePlace
from trainer_service.storage.policy_store import PolicyStore

SHAPES = {"model.embed_tokens.weight": [512, 256], "model.norm.weight": [256], "lm_head.weight": [512, 256]}
SIZE = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())

TIMEOUT_S = 5.0
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


async def started(directory: Path, url: str, **settings: Any) -> Harness:
    """A rollout server that may fetch from the directory's own prefix in the store."""
    write_model(directory / "model", float32_tensors(1.0, SHAPES))
    harness = make_harness(
        directory,
        locations=[f"s3://{BUCKET}/{directory.name}", "s3://absent/policies"],
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


@pytest.fixture
async def stopping_server(tmp_path: Path, proxy: CuttingProxy) -> AsyncIterator[Harness]:
    harness = await started(tmp_path, proxy.url, fetch_timeout_s=TIMEOUT_S)
    yield harness
    await harness.http.aclose()
    await harness.server.close()


def write_version(harness: Harness, version: int, anchor_every: int | None = None) -> PolicyStore:
    """Write a version as the trainer does. Its weights are random numbers, about 1 MB."""
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

    store.write(version, version, write)
    return store


def prefix(harness: Harness) -> ObjectPrefix:
    """Each test has its own."""
    return ObjectPrefix(BUCKET, harness.directory.name)


async def offer(harness: Harness, store: RunningStore, version: int, anchor_every: int | None = None) -> str:
    """Copy a version to the store, as the trainer does. Returns its location."""
    versions = write_version(harness, version, anchor_every)
    settings = ObjectStoreSettings(endpoint_url=store.url)
    place = ObjectStorePlace(versions, prefix(harness), settings, lambda: False)
    await asyncio.to_thread(place.offer, version)
    return place.location(version)


def kept(harness: Harness, version: int) -> bytes:
    """The weights that the server has of a version."""
    found = next(harness.directory.glob(f"weights/own/v{version:08d}-*/{WEIGHTS}"))
    return found.read_bytes()


async def test_a_version_is_fetched_from_the_store(harness: Harness, shared_store: RunningStore) -> None:
    location = await offer(harness, shared_store, 1)
    answer = await harness.reload(1, location)
    assert answer.status_code == 200, answer.text
    assert (await harness.status())["version"] == 1
    assert kept(harness, 1) == (harness.directory / "written/v00000001" / WEIGHTS).read_bytes()


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
    assert kept(harness, 1) == (harness.directory / "written/v00000001" / WEIGHTS).read_bytes()


async def test_a_store_that_sends_nothing_more_is_503(
    harness: Harness, shared_store: RunningStore, proxy: CuttingProxy
) -> None:
    location = await offer(harness, shared_store, 1)
    proxy.cut_after = 0
    answer = await harness.reload(1, location)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "storage_unavailable")
    assert len(proxy.requests) <= 6


async def test_a_corrupt_object_is_422_and_the_old_version_serves(
    harness: Harness, shared_store: RunningStore
) -> None:
    location = await offer(harness, shared_store, 1)
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
async def test_a_missing_object_is_422(harness: Harness, shared_store: RunningStore, name: str) -> None:
    location = await offer(harness, shared_store, 1)
    shared_store.client.delete_object(Bucket=BUCKET, Key=f"{harness.directory.name}/v00000001/{name}")
    answer = await harness.reload(1, location)
    assert (answer.status_code, name in answer.text, "NoSuchKey" in answer.text) == (422, True, True)
    assert (await harness.status())["version"] == 0


async def test_a_server_with_the_base_fetches_the_changes(
    harness: Harness, shared_store: RunningStore, proxy: CuttingProxy
) -> None:
    for version in (1, 2):
        location = await offer(harness, shared_store, version, anchor_every=10)
        answer = await harness.reload(version, location)
        assert answer.status_code == 200, answer.text
    fetched = [line.split()[1] for line in proxy.requests if "v00000002" in line]
    assert [path for path in fetched if path.endswith((".delta", ".safetensors"))] == [
        f"/{BUCKET}/{harness.directory.name}/v00000002/{WEIGHTS}.delta"
    ]
    assert kept(harness, 2) == (harness.directory / "written/v00000002" / WEIGHTS).read_bytes()


# A store that is away, or refuses


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[RunningStore]:
    with object_store() as store:
        yield store


@pytest.fixture
async def its_server(tmp_path: Path, own_store: RunningStore) -> AsyncIterator[Harness]:
    """A server that fetches from `own_store`."""
    harness = await started(tmp_path, own_store.url, fetch_timeout_s=TIMEOUT_S)
    yield harness
    await harness.http.aclose()
    await harness.server.close()


async def test_a_missing_bucket_is_503_because_the_store_may_be_the_wrong_one(harness: Harness) -> None:
    answer = await harness.reload(1, "s3://absent/policies/v00000001")
    assert (answer.status_code, "NoSuchBucket" in answer.text) == (503, True), answer.text


async def test_credentials_that_are_refused_are_503_until_they_are_mended(
    its_server: Harness, own_store: RunningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = await offer(its_server, own_store, 1)
    right = own_store.check_keys()
    for secret, reason in (("a-secret", "InvalidAccessKeyId"), ("", "credentials")):
        for name in KEYS:
            monkeypatch.setenv(name, secret)
        answer = await its_server.reload(1, location)
        assert (answer.status_code, reason in answer.text) == (503, True), answer.text
        assert "a-secret" not in answer.text
    lines = [f"{name.lower()} = {value}" for name, value in right.items()]
    (tmp_path / "credentials").write_text("\n".join(["[default]", *lines]))
    assert (await its_server.reload(1, location)).status_code == 200


async def test_a_signature_with_another_secret_is_503(
    its_server: Harness, own_store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = await offer(its_server, own_store, 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", own_store.check_keys()["AWS_ACCESS_KEY_ID"])
    answer = await its_server.reload(1, location)
    assert (answer.status_code, "SignatureDoesNotMatch" in answer.text) == (503, True), answer.text


async def test_a_store_that_is_down_is_503_until_it_is_back(
    its_server: Harness, own_store: RunningStore
) -> None:
    location = await offer(its_server, own_store, 1)
    own_store.kill()
    answer = await its_server.reload(1, location)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "storage_unavailable")
    assert (await its_server.status())["state"] == "ready"
    own_store.start()
    await offer(its_server, own_store, 1)
    assert (await its_server.reload(1, location)).status_code == 200


async def test_a_store_that_hangs_is_503_after_the_timeout(
    its_server: Harness, own_store: RunningStore
) -> None:
    location = await offer(its_server, own_store, 1)
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
    own = harness.directory / "weights/own"
    await wait_until_async(lambda: not list(own.iterdir()))
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
    harness.network.answers.clear()  # the peer is away
    location = await offer(harness, shared_store, 2)
    answer = await harness.reload(2, location, peer="http://r7:8100")
    assert answer.status_code == 200, answer.text


async def test_a_prefix_beside_the_allowed_one_is_400_and_the_store_is_not_asked(
    harness: Harness, proxy: CuttingProxy
) -> None:
    answer = await harness.reload(1, f"s3://{BUCKET}/{harness.directory.name}-of-others/v00000001")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "location")
    assert not proxy.requests
