"""Versions are copied to a real S3-compatible store: complete ones only, while the training goes on."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_queue.contract.published_policy import MANIFEST, STABLE, FileSpec, ObjectPrefix, sha256_of
from rollout_queue.http import object_store as client
from rollout_queue.http.object_store import StoreUnavailable
from rollout_queue.settings import ObjectStoreSettings
from tests.support.object_store import BUCKET, CuttingProxy, RunningStore, object_store, set_environment
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.waiting import wait_until
from trainer_service.heartbeat import Stopped
from trainer_service.publishing import places
from trainer_service.publishing.places import ObjectStorePlace
from trainer_service.storage.policy_store import PolicyStore

ROOT = "runs/a"
FIRST = f"{ROOT}/v00000001"
LEAST_PART_BYTES = 5 * 2**20
"""The smallest part that the store takes."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningStore]:
    set_environment(monkeypatch, tmp_path)
    with object_store() as store:
        yield store


def published_there(make_harness: MakeHarness, store: RunningStore, **more: object) -> Harness:
    """A trainer that copies its versions to the store."""
    settings = {"publish_url": f"s3://{BUCKET}/{ROOT}", "object_store": {"endpoint_url": store.url}}
    return make_harness(**(settings | more)).start()


def files_of(harness: Harness, version: int) -> dict[str, bytes]:
    directory = harness.store.path_of(version)
    return {f"{ROOT}/{directory.name}/{path.name}": path.read_bytes() for path in directory.iterdir()}


def in_store(store: RunningStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.keys()}  # noqa: SIM118 - no dictionary


def versions_in(store: RunningStore) -> set[str]:
    return {key.split("/")[2] for key in in_store(store)}


def test_a_version_is_copied_before_it_is_announced(make_harness: MakeHarness, store: RunningStore) -> None:
    harness = published_there(make_harness, store)
    harness.step("g")
    assert in_store(store) == files_of(harness, 1)
    announced = harness.gateway.announced[0]
    assert announced["location"] == f"s3://{BUCKET}/{FIRST}"
    assert announced["manifest_sha256"] == sha256_of(harness.store.path_of(1) / MANIFEST)


def test_old_versions_are_removed_from_the_store_unless_the_gateway_needs_them(
    make_harness: MakeHarness, store: RunningStore
) -> None:
    harness = published_there(make_harness, store, keep_policies=2)
    harness.gateway.serving = 1
    for group_id in ("a", "b", "c", "d"):
        harness.step(group_id)
    assert versions_in(store) == {"v00000001", "v00000003", "v00000004"}
    harness.gateway.serving = None
    harness.step("e")
    assert harness.store.versions() == [4, 5]
    assert in_store(store) == files_of(harness, 4) | files_of(harness, 5)


def test_the_training_goes_on_while_the_store_is_away(make_harness: MakeHarness, store: RunningStore) -> None:
    with ThreadPoolExecutor(1) as executor:
        harness = published_there(make_harness, store, publish_every_steps=2, executor=executor)
        store.kill()
        for group_id in ("a", "b", "c"):
            harness.step(group_id)
        assert harness.trainer.step == 3
        publisher = harness.trainer.publisher
        said = wait_until(lambda: publisher.waits_for)
        assert said is not None
        assert said.startswith("the object store to take version 2 (the object store: "), said
        assert not harness.gateway.announced
        store.start()
        publisher.wait()
    assert harness.gateway.announced_versions == [2]
    assert in_store(store) == files_of(harness, 2)


def test_a_trainer_that_is_told_to_stop_leaves_a_store_that_hangs_and_publishes_after_its_restart(
    make_harness: MakeHarness, store: RunningStore
) -> None:
    with ThreadPoolExecutor(1) as executor:
        harness = published_there(make_harness, store, publish_every_steps=2, executor=executor)
        store.hang()
        for group_id in ("a", "b"):
            harness.step(group_id)
        harness.shared_state.stop()
        began_at = time.monotonic()
        with pytest.raises(Stopped):
            harness.trainer.publisher.wait()
        harness.trainer.publisher.close()
        assert time.monotonic() - began_at < places.SILENCE_S / 4
    assert not harness.gateway.announced
    store.go_on()
    harness.restart()
    assert harness.gateway.announced_versions == [2]
    assert in_store(store) == files_of(harness, 2)


def test_leftovers_of_a_dead_process_are_removed(make_harness: MakeHarness, store: RunningStore) -> None:
    for name in (STABLE, MANIFEST, "model-00009.safetensors"):
        store.put(f"{FIRST}/{name}", b"of other weights")
    store.put(f"{ROOT}/v000000012/model.safetensors", b"of another version")
    for version in ("v00000001", "v000000012"):
        key = f"{ROOT}/{version}/model.safetensors"
        store.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    harness = published_there(make_harness, store)
    harness.step("g")
    other = f"{ROOT}/v000000012/model.safetensors"
    assert in_store(store) == files_of(harness, 1) | {other: b"of another version"}
    assert store.uploads() == [other]


def test_a_version_that_cannot_be_removed_from_the_store_is_removed_later(
    make_harness: MakeHarness, store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_: ObjectStorePlace, version: int) -> None:
        raise StoreUnavailable("it refuses")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStorePlace, "withdraw", refuses)
        harness = published_there(make_harness, store, keep_policies=2)
        for group_id in ("a", "b", "c"):
            harness.step(group_id)
    assert harness.store.versions() == [1, 2, 3]
    harness.step("d")
    assert harness.store.versions() == [3, 4]
    assert versions_in(store) == {"v00000003", "v00000004"}


# The copy of one version
class Version:
    """A version on the disk with two large files, and the place that it is copied to."""

    def __init__(self, directory: Path, model: Path, url: str) -> None:
        self.versions = PolicyStore(directory, model, 2)
        self.versions.write(1, 1, self.write)
        settings = ObjectStoreSettings(endpoint_url=url, region="us-east-1")
        self.place = ObjectStorePlace(self.versions, ObjectPrefix(BUCKET, ROOT), settings, lambda: False)

    def write(self, directory: Path) -> list[FileSpec]:
        paths = [directory / f"model-{number}.safetensors" for number in (1, 2)]
        for path in paths:
            path.write_bytes(os.urandom(2 * LEAST_PART_BYTES + 7))
        return [FileSpec(path.name, path.stat().st_size, sha256_of(path)) for path in paths]

    def add(self, size: int) -> None:
        """One more file, which is copied after the others."""
        (self.versions.path_of(1) / "model-3.safetensors").write_bytes(os.urandom(size))

    def files(self) -> dict[str, bytes]:
        return {f"{FIRST}/{path.name}": path.read_bytes() for path in self.versions.path_of(1).iterdir()}


@pytest.fixture
def proxy(store: RunningStore) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(store.port)
    yield proxy
    proxy.close()


@pytest.fixture
def version(
    tmp_path: Path, model_path: Path, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> Version:
    monkeypatch.setattr(client, "PART_BYTES", LEAST_PART_BYTES)
    return Version(tmp_path / "versions", model_path, proxy.url)


def order(proxy: CuttingProxy) -> list[str]:
    """The names of the objects that were written, in the order in which they were complete."""
    lines = [line.split()[:2] for line in proxy.requests]
    whole = [path for method, path in lines if method in ("PUT", "POST") and "partNumber=" not in path]
    return [path.split("?")[0].rpartition("/")[2] for path in whole if "uploads" not in path]


def test_large_files_are_copied_in_parts_and_stable_comes_last(
    version: Version, store: RunningStore, proxy: CuttingProxy
) -> None:
    version.place.offer(1)
    assert in_store(store) == version.files()
    parts = [line for line in proxy.requests if "partNumber=" in line]
    assert len(parts) == 6
    assert order(proxy)[-2:] == [MANIFEST, STABLE]
    proxy.requests.clear()
    version.place.offer(1)
    assert order(proxy) == [], "it is there already"


def test_a_copy_that_failed_goes_on_after_the_files_that_are_there(
    version: Version, store: RunningStore, proxy: CuttingProxy
) -> None:
    write, written = client.ObjectStore.write, list[str]()

    async def fails(self: client.ObjectStore, place: ObjectPrefix, file: Path) -> None:
        if file.name == "model-2.safetensors" and not written.count(file.name):
            written.append(file.name)
            proxy.cut_after = 0
        await write(self, place, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.ObjectStore, "write", fails)
        with pytest.raises(StoreUnavailable):
            version.place.offer(1)
        assert f"{FIRST}/{MANIFEST}" not in store.keys()  # noqa: SIM118
        proxy.cut_after = None
        proxy.requests.clear()
        version.place.offer(1)
    assert in_store(store) == version.files()
    assert order(proxy) == ["model-2.safetensors", "tokenizer.json", MANIFEST, STABLE]
    assert store.uploads() == []
    version.place.withdraw(1)
    assert store.keys() == []
    assert store.uploads() == []


def test_a_copy_to_a_store_that_hangs_fails_after_the_timeout(
    version: Version, store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs before a file that fits into no buffer of a connection."""
    monkeypatch.setattr(client, "PART_BYTES", 2 * LEAST_PART_BYTES)
    version.add(5 * LEAST_PART_BYTES)
    write = client.ObjectStore.write

    async def hangs(self: client.ObjectStore, place: ObjectPrefix, file: Path) -> None:
        if file.name == "model-3.safetensors":
            store.hang()
        await write(self, place, file)

    with monkeypatch.context() as patch:
        patch.setattr(places, "SILENCE_S", 1.0)
        patch.setattr(client.ObjectStore, "write", hangs)
        began_at = time.monotonic()
        with pytest.raises(StoreUnavailable):
            version.place.offer(1)
        assert time.monotonic() - began_at < 30.0
    store.go_on()
    version.place.offer(1)
    assert in_store(store) == version.files()
