"""Publishing: a number names one set of weights for ever, and a gateway that is away, answers nonsense or
has a newer version costs nothing."""

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_queue.contract.published_policy import STABLE, FileSpec, sha256_of
from rollout_queue.protocol.gateway_messages import PolicyDetail
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.metric_files import lines
from tests.support.trainer_service.same_training import differs_by
from tests.support.waiting import PATIENCE_S
from trainer_service.heartbeat import Stopped
from trainer_service.model.host_copies import WeightSnapshot
from trainer_service.publishing import publisher
from trainer_service.publishing.gateway_client import GatewayClient, GatewayUnavailable


@pytest.mark.parametrize(
    ("gateway", "announced"),
    [
        ({"refusals": 3}, [1, 2]),
        ({"nonsense": 2}, [1, 2]),  # for the request for the newest version, and for the announcement
        ({"versions": [0, 41]}, [42, 43]),
        ({"server_ok": False}, [1, 2]),
        ({"conflict": True}, []),
    ],
    ids=[
        "away for a while",
        "a proxy answers",
        "newer versions",
        "no server takes it",
        "the number is taken",
    ],
)
def test_a_gateway_that_does_not_take_a_version_at_once_costs_no_session(
    harness: Harness, gateway: dict[str, Any], announced: list[int]
) -> None:
    for name, value in gateway.items():
        setattr(harness.gateway, name, copy(value))
    for group_id in ("g", "h"):
        harness.step(group_id, version=harness.trainer.version)
    assert harness.gateway.announced_versions == announced
    assert not announced or harness.trainer.version == announced[-1]
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_trainer_told_to_stop_while_the_gateway_is_away_publishes_the_same_weights_after_its_restart(
    harness: Harness,
) -> None:
    harness.gateway.refusals = 10**6
    harness.agents.group("g", [1.0, 0.0])
    harness.shared_state.stop()
    with pytest.raises(Stopped):
        harness.trainer.run_once()
    made = harness.weights()
    assert harness.session_codes()["g-0"] == "trained", "a durable checkpoint contains it"
    assert [line["step"] for line in lines(harness.root / "metrics.jsonl")] == [1]
    harness.gateway.refusals = 0
    again = harness.restart()
    assert harness.gateway.announced_versions == [1]
    assert differs_by(made, again.weights()) == 0
    assert not again.trainer.run_once()
    assert train(again, "h") == 2


@pytest.mark.parametrize(
    ("gateway", "kept"),
    [
        ({}, [4, 5]),
        ({"serving": 2}, [2, 4, 5]),
        ({"serving": 4, "target": 3}, [3, 4, 5]),
        ({"speechless": True}, [1, 2, 3, 4, 5]),
        ({"idle": True}, [4, 5]),
    ],
    ids=["the newest is served", "an old one is", "an old one is next", "it does not say", "none is served"],
)
def test_old_versions_are_removed_unless_the_gateway_may_need_them(
    make_harness: MakeHarness, gateway: dict[str, Any], kept: list[int]
) -> None:
    """The best checkpoints stay for their first score, and the files of their versions do not."""
    harness = make_harness(keep_policies=2, keep_checkpoints=2).start()
    for name, value in gateway.items():
        setattr(harness.gateway, name, value)
    for index in range(5):
        harness.step(f"g{index}")
    assert harness.store.versions() == kept
    assert {1, 4, 5} <= harness.checkpoints.versions().keys(), "version 1 has no score yet"


@pytest.mark.parametrize("refused", ["rename", "rmdir"])
def test_an_old_version_that_cannot_be_removed_is_removed_later(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Its directory may be read-only, or have `.nfs` files of a reader."""
    harness = make_harness(keep_policies=2).start()
    harness.step("a")
    call = getattr(os, refused)

    def refusing(path: str | Path, *given: object, **more: object) -> None:
        if "v00000001" in str(path):
            raise OSError(errno.EBUSY, "in use", str(path))
        call(path, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refusing)
        harness.step("b")
        harness.step("c")
    harness.step("d")
    assert {path.name for path in harness.settings.policies_dir.iterdir()} == {"v00000003", "v00000004"}


def test_a_version_whose_removal_a_crash_has_ended_is_removed(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.step("a")
    (harness.store.path_of(1) / STABLE).unlink()
    harness.step("b")
    assert [path.name for path in harness.settings.policies_dir.iterdir()] == ["v00000002"]


# In the background
class Gate:
    """Holds the writing of versions until a test opens it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.waiting = Event(), Event()
        write = WeightSnapshot.write

        def gated(snapshot: WeightSnapshot, directory: Path) -> list[FileSpec]:
            self.waiting.set()
            assert self.opened.wait(PATIENCE_S)
            return write(snapshot, directory)

        monkeypatch.setattr(WeightSnapshot, "write", gated)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}


def test_training_goes_on_while_a_version_is_written(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have the weights of their own step, although later steps have changed the model since."""
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor(1) as executor:
        harness = make_harness(publish_every_steps=2, executor=executor).start()
        for group_id in ("a", "b"):
            harness.step(group_id)
        after_two = {name: tensor.clone() for name, tensor in harness.weights().items()}
        assert gate.waiting.wait(PATIENCE_S)
        harness.step("c")
        assert harness.trainer.step == 3
        assert not harness.gateway.announced
        gate.opened.set()
        harness.step("d")  # waits for the former version, and publishes the next one
        harness.trainer.publisher.wait()
    assert harness.gateway.announced_versions == [2, 4]
    written = weights_of(harness.store.path_of(2))
    assert all(torch.equal(written[name], after_two[name]) for name in written)
    assert not all(torch.equal(written[name], harness.weights()[name]) for name in written)


def test_a_trainer_that_is_told_to_stop_does_not_wait_for_a_version_that_is_written(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor(1) as executor:
        harness = make_harness(executor=executor).start()
        harness.step("a")
        assert gate.waiting.wait(PATIENCE_S)
        harness.shared_state.stop()
        with pytest.raises(Stopped):
            harness.step("b")
        gate.opened.set()
        harness.trainer.publisher.close()
    assert harness.trainer.step == 2
    assert harness.gateway.announced_versions == [1]


def test_the_training_goes_on_while_a_gateway_does_not_say_how_a_push_goes(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = Event(), Event()

    def hangs(_: GatewayClient, __: int) -> PolicyDetail:
        asked.set()
        assert answered.wait(PATIENCE_S)
        raise GatewayUnavailable("it hung")

    monkeypatch.setattr(GatewayClient, "push_of", hangs)
    monkeypatch.setattr(publisher, "FOLLOW_EVERY_S", 0.0)
    with ThreadPoolExecutor(1) as executor:
        harness = make_harness(publish_every_steps=3, executor=executor).start()
        for group_id in ("a", "b", "c"):
            harness.step(group_id)
        harness.trainer.publisher.wait()
        harness.step("d")
        assert asked.wait(PATIENCE_S)
        harness.step("e")
        answered.set()
    assert harness.trainer.step == 5


def test_what_a_publication_raises_is_raised(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_made = Event()

    def fails(_: WeightSnapshot, directory: Path) -> list[FileSpec]:
        assert step_made.wait(PATIENCE_S)
        raise RuntimeError(f"a fault in {directory.name}")

    monkeypatch.setattr(WeightSnapshot, "write", fails)
    with ThreadPoolExecutor(1) as executor:
        harness = make_harness(executor=executor).start()
        harness.step("a")
        step_made.set()
        with pytest.raises(RuntimeError, match=r"a fault in v00000001\.tmp"):
            harness.step("b")


def test_a_snapshot_uses_the_memory_of_the_former_one(harness: Harness) -> None:
    first = harness.start().policy.snapshot()
    memory = [tensor.value.data_ptr() for tensor in first.tensors]
    before = [tensor.value.clone() for tensor in first.tensors]
    harness.step("a")
    later = harness.policy.snapshot()
    assert [tensor.value.data_ptr() for tensor in later.tensors] == memory
    assert any(
        not torch.equal(tensor.value, value) for tensor, value in zip(later.tensors, before, strict=True)
    )


@pytest.mark.parametrize("file_bytes", [1, 4096, 2**30])
def test_large_weights_are_files_with_an_index(harness: Harness, tmp_path: Path, file_bytes: int) -> None:
    """Other readers than our own find the same tensors, and the same digests."""
    target = tmp_path / "version"
    target.mkdir()
    snapshot = harness.policy.snapshot()
    specs = snapshot.write(target, file_bytes)
    for spec in specs:
        assert (spec.size, spec.sha256) == (
            (target / spec.name).stat().st_size,
            sha256_of(target / spec.name),
        )
    read: dict[str, torch.Tensor] = {}
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= file_bytes
        read |= tensors
    assert {each.name for each in snapshot.tensors} == read.keys()
    assert all(torch.equal(read[each.name], each.value) for each in snapshot.tensors)
    index = target / "model.safetensors.index.json"
    assert index.exists() == (file_bytes < 2**30)
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {tensor.name: spec.name for spec in specs for tensor in spec.tensors}


def forget_policies(harness: Harness) -> None:
    shutil.rmtree(harness.settings.policies_dir)
    harness.settings.policies_dir.mkdir()


def train(harness: Harness, group_id: str) -> int:
    harness.step(group_id)
    return harness.trainer.version


def test_a_number_whose_weights_were_lost_in_a_crash_is_not_used_again(make_harness: MakeHarness) -> None:
    """No checkpoint and no file has these weights, but /status and the metrics have named their version. A
    gateway that goes away after the first number is not waited for."""
    harness = make_harness(checkpoint_every_steps=10, publish_every_steps=10).start()
    assert train(harness, "g") == 1
    harness.gateway.away = True
    assert train(harness, "h") == 2
    harness.gateway.away = False
    harness = harness.restart()
    assert harness.trainer.version == 0
    assert harness.trainer.run_once()
    assert harness.trainer.version == 3


def test_a_number_published_before_its_checkpoint_is_not_used_again(
    make_harness: MakeHarness,
) -> None:
    """This holds even if the directory of versions is lost, and the gateway with its Redis as well."""
    harness = make_harness(checkpoint_every_steps=10).start()
    assert train(harness, "g") == 1
    forget_policies(harness)
    harness.gateway.versions = [0]
    harness = harness.restart()
    assert harness.trainer.run_once()
    assert harness.gateway.announced_versions == [1, 2]


def test_an_older_checkpoint_is_followed_by_a_number_beyond_the_newest(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    assert train(harness, "g") == 1
    kept = harness.root / "backup"
    shutil.copytree(harness.settings.checkpoint_dir, kept)
    assert [train(harness, "h"), train(harness, "i")] == [2, 3]
    shutil.rmtree(harness.settings.checkpoint_dir)
    kept.rename(harness.settings.checkpoint_dir)
    forget_policies(harness)
    harness = harness.restart()
    assert harness.trainer.version == 1
    assert train(harness, "j") == 4


def test_lost_checkpoints_are_followed_by_a_number_beyond_those_on_disk(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness().start()
    assert train(harness, "g") == 1
    shutil.rmtree(harness.settings.checkpoint_dir)
    harness.gateway.versions = [0]
    harness = harness.restart()
    assert train(harness, "h") == 2


def test_the_first_number_of_a_process_waits_for_the_gateway_and_nothing_is_trained_meanwhile(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both directories are lost here, so that only the gateway knows which versions were published."""
    assert train(harness, "g") == 1
    shutil.rmtree(harness.root)
    harness = harness.restart()
    harness.gateway.away = True
    harness.agents.group("h", [1.0, 0.0])
    before = harness.weights()
    said: list[str] = []

    def sleep(_seconds: float) -> None:
        said.append(harness.waits_for)
        assert differs_by(before, harness.weights()) == 0
        assert len(harness.pending) == 6
        harness.gateway.away = False

    monkeypatch.setattr(harness.shared_state, "sleep", sleep)
    assert harness.trainer.run_once()
    assert said[0].startswith("the gateway to say which versions it knows (ConnectError")
    assert harness.gateway.announced_versions == [1, 2]


def test_a_number_that_was_reserved_meanwhile_is_skipped(
    harness: Harness,
) -> None:
    """For example, a trainer whose disk is lost now may have reserved it."""
    assert train(harness, "g") == 1
    harness.stream.reserve(7, "file:///elsewhere")
    assert [train(harness, "h"), train(harness, "i")] == [8, 9]
    assert harness.gateway.announced_versions == [1, 8, 9]
