"""An engine receives tensors from the trainer behind the same `POST /reload`: the order of the calls, files
as the fallback, and a restart wherever the engine may have a part of the tensors."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_queue.protocol.rollout_server_messages import SentTensor
from tests.support.rollout_server.fake_trainer import GROUP, URL, FakeTrainer, fake_trainer
from tests.support.rollout_server.fakes import FakeEngine
from tests.support.rollout_server.harness import Harness, make_harness
from tests.support.rollout_server.weights import WEIGHTS, float32_tensors, publish, write_safetensors
from tests.support.waiting import PATIENCE_S, wait_until_async

RECEIVING = [
    "/init_weights_update_group",
    "/begin_weight_update",
    *["/update_weights_from_distributed"] * 3,
    "/end_weight_update",
    "/destroy_weights_update_group",
]
PROOF = ["/model_info", "/weights_checker"]
EXTRA = SentTensor(name="extra", dtype="float32", shape=(1,), fingerprint=0)


@dataclass
class Pair:
    """A rollout server with fake engine, and the trainer that sends."""

    harness: Harness
    trainer: FakeTrainer

    def offer(self, version: int) -> Path:
        """Publish a version, and have the trainer offer its tensors."""
        directory = self.harness.policy(version)
        publish(directory, version, collective=True)
        self.trainer.directory = self.harness.engine.broadcasts = directory
        return directory


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    harness = make_harness(tmp_path, admin_keys=["key"], engine_wait_s=1e6)
    harness.http.headers["authorization"] = "Bearer key"
    async with fake_trainer() as trainer, harness.started():
        harness.network.source = trainer.handle
        yield Pair(harness, trainer)


async def test_the_engine_receives_while_paused_and_is_proved(pair: Pair) -> None:
    directory = pair.offer(1)
    engine = pair.harness.engine
    engine.calls.clear()
    answer = await pair.harness.reload(1, directory)
    assert (answer.status_code, answer.json()["fallback"]) == (200, None), answer.text
    assert answer.json()["paused_s"] > 0
    assert answer.json()["seconds"]["fetch"] > 0
    assert engine.calls == ["/server_info", "/pause_generation", *RECEIVING, *PROOF, "/continue_generation"]
    assert pair.trainer.calls == [("POST", "/collective/1"), ("DELETE", f"/collective/{GROUP}")]
    assert pair.trainer.keys == {"Bearer key"}
    joined = engine.bodies[0]
    assert (joined["rank_offset"], joined["world_size"], joined["backend"]) == (1, 3, "gloo")
    buckets = [body for body in engine.bodies if "names" in body]
    assert [(body["weight_version"], body["flush_cache"]) for body in buckets] == [
        (None, False),
        (None, False),
        ("1", True),
    ]
    assert sorted(name for body in buckets for name in body["names"]) == sorted(float32_tensors())
    assert not engine.groups
    assert not engine.paused


async def test_preparing_fetches_no_weights_and_a_prepared_version_that_is_gone_needs_files(
    pair: Pair,
) -> None:
    directory = pair.offer(1)
    assert (await pair.harness.reload(1, directory, prepare=True)).status_code == 200
    assert pair.harness.kept() == []
    pair.trainer.refusal = httpx.Response(410)
    assert (await pair.harness.reload(1, directory, prepare=True)).status_code == 200
    assert pair.harness.kept() == ["v00000001"]
    pair.harness.engine.calls.clear()
    assert (await pair.harness.reload(1, directory)).json()["fallback"] is None, "its files are here"
    assert "/update_weights_from_disk" in pair.harness.engine.calls


async def test_the_files_follow_for_other_servers_and_restarts(pair: Pair) -> None:
    directory = pair.offer(1)
    digest = publish(directory, 1, collective=True)
    assert (await pair.harness.reload(1, directory)).status_code == 200
    file = f"/weights/1/{digest}/{WEIGHTS}"

    async def status() -> int:
        return (await pair.harness.http.get(file)).status_code

    while await status() != 200:
        await wait_until_async(lambda: pair.harness.kept() == ["v00000001"])
    (directory / "manifest.json").unlink()  # the trainer is gone
    await pair.harness.kill_engine()
    await pair.harness.until_ready()
    assert (await pair.harness.status())["version"] == 1
    boot = pair.harness.engine.boots[-1]
    assert (boot.version, (boot.directory / WEIGHTS).exists()) == (1, True)


async def test_without_files_an_engine_starts_again_with_the_version_before(pair: Pair) -> None:
    first = pair.harness.policy(1)
    assert (await pair.harness.reload(1, first)).status_code == 200
    second = pair.offer(2)
    weights = (second / WEIGHTS).read_bytes()
    pair.harness.engine.broadcasts = pair.harness.policy(3, fill=3.0)
    (second / WEIGHTS).write_bytes(weights[:-1])
    pair.trainer.directory = pair.harness.engine.broadcasts
    assert (await pair.harness.reload(2, second)).json()["fallback"] is None
    await pair.harness.kill_engine()
    await pair.harness.until_ready()
    assert (await pair.harness.status())["version"] == 1
    (second / WEIGHTS).write_bytes(weights)
    pair.trainer.refusal = httpx.Response(410)
    assert (await pair.harness.reload(2, second)).status_code == 200


async def test_files_of_a_received_version_that_do_not_come_give_way_to_those_of_the_next(pair: Pair) -> None:
    directory, asked = pair.offer(1), asyncio.Event()

    async def hanging(request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/collective"):
            return await pair.trainer.handle(request)
        name = request.url.path.rpartition("/")[2]
        if name == WEIGHTS:
            asked.set()
            await asyncio.Event().wait()
        return httpx.Response(200, content=(directory / name).read_bytes())

    pair.harness.network.source = hanging
    assert (await pair.harness.reload(1, f"{URL}/weights/1")).json()["fallback"] is None
    async with asyncio.timeout(PATIENCE_S):
        await asked.wait()
        answer = await pair.harness.reload(2, pair.harness.policy(2))
    assert (answer.status_code, pair.harness.kept()) == (200, ["v00000002"])


async def test_a_manifest_whose_tensors_do_not_fit_is_refused(pair: Pair) -> None:
    directory = pair.offer(1)
    write_safetensors(directory / WEIGHTS, float32_tensors() | {"lm_head.weight": ("F32", [2, 4], bytes(32))})
    publish(directory, 1, collective=True)
    for prepare in (True, False):
        answer = await pair.harness.reload(1, directory, prepare=prepare)
        assert (answer.status_code, "lm_head.weight" in answer.text) == (422, True)
    assert pair.trainer.calls == []


FALLBACKS: dict[str, tuple[str, str, Any, str]] = {
    "the snapshot is gone": ("trainer", "refusal", httpx.Response(410), "410"),
    "a proxy answers": ("trainer", "refusal", httpx.Response(200, content=b"<html>"), "not a Joining"),
    "the trainer is away": ("network", "source", None, "nobody listens"),
    "it would send other tensors": ("trainer", "more", [EXTRA], "other tensors"),
    "its port cannot be reached": ("trainer", "port", 1, "127.0.0.1:1 cannot be reached"),
    "the engine has replicas": ("engine", "info", FakeEngine().info | {"dp_size": 2}, "data parallelism"),
    "the engine does not tell its size": ("engine", "info", {}, "tp_size"),
    "the engine cannot join": ("engine", "refuses", RECEIVING[0], f"{RECEIVING[0]} answers 400"),
}
"""Who behaves in another way, how, and what the answer says of it."""


@pytest.mark.parametrize("reason", FALLBACKS)
async def test_files_are_loaded_in_the_same_reload(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    directory = pair.offer(1)
    who, name, value, sentence = FALLBACKS[reason]
    network, engine = pair.harness.network, pair.harness.engine
    owner = {"trainer": pair.trainer, "network": network, "engine": engine}[who]
    monkeypatch.setattr(owner, name, value)
    engine.calls.clear()
    answer = await pair.harness.reload(1, directory)
    assert (answer.status_code, answer.json()["version"]) == (200, 1), answer.text
    assert sentence in answer.json()["fallback"]
    assert "/begin_weight_update" not in engine.calls
    assert engine.calls[-5:] == [
        "/pause_generation",
        "/update_weights_from_disk",
        *PROOF,
        "/continue_generation",
    ]
    assert len(engine.boots) == 1
    posts = [call for call in pair.trainer.calls if call[0] == "POST"]
    if posts and pair.trainer.refusal is None:
        assert ("DELETE", f"/collective/{GROUP}") in pair.trainer.calls, "the trainer waits for nobody"


@pytest.mark.parametrize("path", sorted(set(RECEIVING[1:-1])))
async def test_an_engine_that_may_have_a_part_of_the_tensors_starts_again(pair: Pair, path: str) -> None:
    directory = pair.offer(1)
    pair.harness.engine.refuses = path
    answer = await pair.harness.reload(1, directory)
    assert (answer.status_code, path in answer.text) == (503, True)
    assert pair.trainer.calls[-1] == ("DELETE", f"/collective/{GROUP}")
    await pair.harness.until_ready()
    assert [policy.version for policy in pair.harness.engine.boots] == [0, 0]
    again = await pair.harness.reload(1, directory)
    assert (again.status_code, "an engine was lost" in again.json()["fallback"]) == (200, True)


@pytest.mark.parametrize("push", [None, 7])
async def test_an_engine_that_dies_while_it_joins_is_not_waited_for(pair: Pair, push: int | None) -> None:
    """It says that it cannot join, and is dead before the files could be loaded."""
    directory, engine = pair.offer(1), pair.harness.engine
    engine.refuses = "/init_weights_update_group"
    engine.boot_gate.clear()
    ask = pair.trainer.handle

    async def dead(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            await pair.harness.kill_engine()
        return await ask(request)

    pair.harness.network.source = dead
    async with asyncio.timeout(PATIENCE_S):
        answer = await pair.harness.reload(1, directory, push=push)
    assert (answer.status_code, "engine_unavailable" in answer.text) == (503, True), answer.text
    engine.boot_gate.set()


async def test_an_engine_that_takes_the_version_and_keeps_its_weights_starts_again(pair: Pair) -> None:
    first = pair.offer(1)
    assert (await pair.harness.reload(1, first)).status_code == 200
    second = pair.offer(2)
    pair.harness.engine.keeps_old_weights = True
    answer = await pair.harness.reload(2, second)
    assert (answer.status_code, "still in the engine" in answer.text) == (503, True)
    await pair.harness.until_ready()
    assert (await pair.harness.status())["version"] == 1


async def test_a_group_that_the_engine_does_not_leave_fails_no_reload(pair: Pair) -> None:
    directory = pair.offer(1)
    pair.harness.engine.refuses = "/destroy_weights_update_group"
    answer = await pair.harness.reload(1, directory)
    assert (answer.status_code, answer.json()["fallback"]) == (200, None)
