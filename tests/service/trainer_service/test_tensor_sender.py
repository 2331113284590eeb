"""The trainer sends tensors from its snapshot: exact bytes, and a hung engine delays the next one briefly."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from rollout_queue.contract.published_policy import MANIFEST, Manifest
from rollout_queue.http.callers import Keyring
from rollout_queue.protocol.rollout_server_messages import JoinBody, Joining
from rollout_server.weights.weight_files import fingerprint as fingerprint_of_file
from rollout_server.weights.weight_files import read_header
from tests.support.serving import serving
from tests.support.trainer_service.harness import MakeHarness
from tests.support.trainer_service.receiving import join, receive, receive_bucket
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.app import create_app
from trainer_service.model.host_copies import HostTensor, WeightSnapshot
from trainer_service.publishing.process_group import Broadcaster, joined_group
from trainer_service.publishing.tensor_sender import NotSent, TensorSender, fingerprint, is_finite
from trainer_service.settings import CollectiveSettings
from trainer_service.shared_state import SharedState
from trainer_service.storage.policy_store import PolicyStore, manifest_sha256

CPU = torch.device("cpu")
DIGEST = "0" * 64
WISH = JoinBody(manifest_sha256=DIGEST, ranks=1, device="cpu", wait_s=20.0)
TIMEOUT_S = 60.0


def tensors(fill: float = 1.0) -> list[HostTensor]:
    values = {
        "half": torch.full((3, 5), fill, dtype=torch.bfloat16),
        "whole": torch.full((7,), fill, dtype=torch.float32),
        "large": torch.full((64, 64), fill, dtype=torch.float32),
        "odd": torch.full((1,), fill, dtype=torch.bfloat16),
        "empty": torch.empty(0, dtype=torch.bfloat16),
    }
    return [HostTensor(name, value) for name, value in values.items()]


@pytest.fixture
def sender() -> Iterator[TensorSender]:
    sender = TensorSender(CollectiveSettings(senders=1, timeout_s=TIMEOUT_S), CPU, bucket_bytes=128)
    yield sender
    sender.close()


@pytest.fixture
def app(sender: TensorSender, tmp_path: Path) -> FastAPI:
    store, keys = PolicyStore(tmp_path / "policies", tmp_path, keep=2), Keyring(["client"], ["admin"])
    return create_app(SharedState(), lambda *_: [], store, keys, CollectorRegistry(), sender)


def begun(sender: TensorSender, version: int = 1) -> Joining:
    return sender.join(version, WISH).result(PATIENCE_S)


def test_an_engine_receives_exactly_the_snapshot(sender: TensorSender) -> None:
    sent = tensors()
    sender.offer(1, DIGEST, sent)
    joining = begun(sender)
    assert (joining.backend, joining.world_size, joining.master_address) == ("gloo", 2, "127.0.0.1")
    assert len(joining.buckets) == 3, "one for the tensor that is larger than a bucket"
    received = receive(joining)
    assert sender.end(joining.group)
    assert received.keys() == {tensor.name for tensor in sent}
    for tensor in sent:
        assert received[tensor.name].dtype == tensor.value.dtype
        assert torch.equal(received[tensor.name], tensor.value)


def test_only_the_newest_version_with_this_content_is_sent(sender: TensorSender) -> None:
    with pytest.raises(NotSent):
        sender.join(1, WISH)
    sender.offer(2, DIGEST, tensors())
    assert (sender.holds(1), sender.holds(2)) == (False, True)
    for version, digest in ((1, DIGEST), (2, "1" * 64)):
        with pytest.raises(NotSent):
            sender.join(version, WISH.model_copy(update={"manifest_sha256": digest}))
    sender.withdraw()
    with pytest.raises(NotSent):
        sender.join(2, WISH)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_never_offered(sender: TensorSender, value: float) -> None:
    spoilt = tensors()
    spoilt[2].value[63, 63] = value
    sender.offer(1, DIGEST, spoilt)
    assert not sender.holds(1)
    assert not is_finite(torch.tensor([1.0, value], dtype=torch.bfloat16))


def test_engines_wait_for_a_free_sender(sender: TensorSender) -> None:
    sender.offer(1, DIGEST, tensors())
    first = begun(sender)
    waiting, given_up = sender.join(1, WISH), sender.join(1, WISH)
    receive(first)
    assert not waiting.done()
    assert given_up.cancel()
    sender.end(first.group)
    second = waiting.result(PATIENCE_S)
    assert second.group != first.group
    assert receive(second)
    sender.end(second.group)


def test_the_next_snapshot_waits_for_an_engine_that_receives(sender: TensorSender) -> None:
    sent = tensors()
    sender.offer(1, DIGEST, sent)
    joining = begun(sender)
    group = join(joining)
    with ThreadPoolExecutor(1) as threads:
        withdrawn = threads.submit(sender.withdraw)
        received = receive_bucket(group, joining.buckets[0])
        assert not withdrawn.done()
        for bucket in joining.buckets[1:]:
            received |= receive_bucket(group, bucket)
        withdrawn.result(PATIENCE_S)
    for tensor in sent:
        tensor.value.fill_(2.0)
    assert all(bool((value == 1.0).all()) for value in received.values())
    sender.end(joining.group)


def test_the_next_snapshot_waits_longer_than_the_timeout_for_an_engine_that_goes_on(
    turned: TurnedClock,
) -> None:
    copied = Semaphore(0)

    @contextmanager
    def watched(*given: Any) -> Iterator[Broadcaster]:
        with joined_group(*given) as group:

            def broadcast(bucket: torch.Tensor) -> None:
                copied.release()
                group.broadcast(bucket)

            yield SimpleNamespace(broadcast=broadcast)

    sender = TensorSender(CollectiveSettings(timeout_s=TIMEOUT_S), CPU, bucket_bytes=128, join=watched)
    sender.offer(1, DIGEST, tensors())
    joining = begun(sender)
    group = join(joining)
    with ThreadPoolExecutor(1) as threads:
        withdrawn = threads.submit(copy_context().run, sender.withdraw)
        for bucket in joining.buckets:
            assert copied.acquire(timeout=PATIENCE_S)
            turned.turn(0.6 * TIMEOUT_S)  # each bucket is taken late, and in time
            assert receive_bucket(group, bucket)
        withdrawn.result(PATIENCE_S)
    sender.end(joining.group)
    sender.close()


def test_an_engine_that_hangs_delays_the_next_snapshot_by_the_timeout_only(
    sender: TensorSender, stopped: TurnedClock
) -> None:
    sent = tensors()
    sender.offer(1, DIGEST, sent)
    joining = begun(sender)
    group = join(joining)
    receive_bucket(group, joining.buckets[0])
    turns = 0
    with ThreadPoolExecutor(1) as threads:
        withdrawn = threads.submit(copy_context().run, sender.withdraw)
        while not withdrawn.done():
            stopped.turn(TIMEOUT_S / 10)
            turns += 1
            wait([withdrawn], 0.05)  # it may begin to wait, and see that the time has come
    for tensor in sent:
        tensor.value.fill_(2.0)
    assert turns >= 10
    try:  # what it still gets belongs to the old snapshot
        received = receive_bucket(group, joining.buckets[1], timeout_s=1.0)
        assert all(bool((value == 1.0).all()) for value in received.values())
        receive_bucket(group, joining.buckets[2], timeout_s=1.0)
    except RuntimeError:
        pass
    else:
        pytest.fail("the transfer was not ended")
    wait_until(lambda: not sender.end(joining.group))
    sender.offer(2, DIGEST, tensors(3.0))
    again = begun(sender, 2)
    assert receive(again)["whole"].tolist() == [3.0] * 7
    sender.end(again.group)


def test_an_engine_that_never_joins_frees_the_sender() -> None:
    # torch, not our clock, measures how long an engine may take to join
    sender = TensorSender(CollectiveSettings(senders=1, timeout_s=5.0), CPU, bucket_bytes=128)
    sender.offer(1, DIGEST, tensors())
    lost = begun(sender)
    joining = begun(sender)
    assert lost.group != joining.group
    assert receive(joining)
    sender.end(joining.group)
    sender.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_sides_compute_the_same_fingerprint(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.from_numpy(np.random.default_rng(1).standard_normal(2**20 + 3)).to(dtype)
    WeightSnapshot([HostTensor("weight", value)]).write(tmp_path)
    path = tmp_path / "model.safetensors"
    assert fingerprint_of_file(path, read_header(path)["weight"]) == fingerprint(value)
    value[5] *= -1
    assert fingerprint_of_file(path, read_header(path)["weight"]) != fingerprint(value)


def test_rollout_servers_ask_with_the_admin_key(sender: TensorSender, app: FastAPI) -> None:
    client = TestClient(app)
    body, hasty = WISH.model_dump(), WISH.model_copy(update={"wait_s": 0.2}).model_dump()
    assert client.post("/collective/1", json=body).status_code == 401
    client.headers["authorization"] = "Bearer admin"
    assert client.post("/collective/1", json=body).status_code == 410
    assert client.get("/collective/1").json()["held"] is False
    sender.offer(1, DIGEST, tensors())
    assert client.get("/collective/1").json()["held"] is True
    joining = Joining.read(client.post("/collective/1", json=body).content)
    assert client.post("/collective/1", json=hasty).status_code == 503, "the sender is busy"
    assert client.post("/collective/1", json={**body, "ranks": 0}).status_code == 400
    assert receive(joining)
    assert client.delete(f"/collective/{joining.group}").json() == {"ended": True}
    wait_until(lambda: client.delete(f"/collective/{joining.group}").json() == {"ended": False})


def test_a_rollout_server_that_went_away_takes_no_sender(
    sender: TensorSender, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.offer(1, DIGEST, tensors())
    first = begun(sender)
    asked, join_of = list[Future[Joining]](), sender.join

    def noted(*wish: Any) -> Future[Joining]:
        asked.append(join_of(*wish))
        return asked[-1]

    monkeypatch.setattr(sender, "join", noted)
    group = join(first)
    with serving(app) as url:
        patience, admin = httpx.Timeout(PATIENCE_S, read=0.5), {"x-api-key": "admin"}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/collective/1", json=WISH.model_dump(), timeout=patience, headers=admin)
        wait_until(lambda: asked and asked[0].cancelled())
        waiting = sender.join(1, WISH)
        for bucket in first.buckets:
            receive_bucket(group, bucket)
        sender.end(first.group)
        began_at = time.monotonic()
        second = waiting.result(PATIENCE_S)
        assert time.monotonic() - began_at < TIMEOUT_S, "a sender has waited for the server that went away"
        assert receive(second)
        sender.end(second.group)


def test_each_published_version_is_offered_until_the_next_step(make_harness: MakeHarness) -> None:
    harness = make_harness(transport="collective").start()
    sender = harness.sender
    assert sender is not None
    for group_id in ("g", "h"):
        harness.step(group_id)
        version = harness.trainer.version
        path = harness.store.path_of(version)
        assert msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest).collective
        wish = WISH.model_copy(update={"manifest_sha256": manifest_sha256(path)})
        joining = sender.join(version, wish).result(PATIENCE_S)
        received = receive(joining)
        sender.end(joining.group)
        weights = harness.weights()
        assert set(received) <= set(weights)
        for name, value in received.items():
            assert torch.equal(value, weights[name].to(value.dtype))
        assert not sender.holds(version - 1)
