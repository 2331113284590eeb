"""Publishing: training loses nothing if the gateway is away, answers nonsense, or has a newer version."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

from rollout_queue.contract.policies.policy import STABLE, FileSpec, sha256_of
from rollout_queue.protocol.policies import PolicyDetail
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.waiting import PATIENCE_S
from trainer_service.model.snapshot import WeightSnapshot
from trainer_service.publishing import publisher
from trainer_service.publishing.gateway_client import GatewayClient, GatewayUnavailable
from trainer_service.status.heartbeat import Stopped


def test_a_gateway_that_is_away_is_asked_again_and_loses_nothing(harness: Harness) -> None:
    harness.gateway.refusals = 3
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert [body["version"] for body in harness.gateway.announced] == [1]
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_trainer_told_to_stop_while_the_gateway_is_away_publishes_after_its_restart(
    harness: Harness,
) -> None:
    harness.gateway.refusals = 10**6
    harness.agents.group("g", [1.0, 0.0])
    harness.shared_state.stop()
    with pytest.raises(Stopped):
        harness.trainer.run_once()
    assert harness.session_codes()["g-0"] == "trained", "a durable checkpoint contains it"
    harness.gateway.refusals = 0
    again = harness.restart()
    assert [body["version"] for body in harness.gateway.announced] == [1]
    assert not again.trainer.run_once()


def test_a_request_that_a_proxy_answered_is_repeated(harness: Harness) -> None:
    harness.gateway.nonsense = 2  # for the request for the newest version, and for the announcement
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert [body["version"] for body in harness.gateway.announced] == [1]


def test_the_number_of_a_version_is_beyond_the_gateways(harness: Harness) -> None:
    harness.gateway.versions.append(41)
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    assert harness.trainer.version == 42
    assert harness.gateway.announced[0]["version"] == 42


def test_a_version_that_no_server_took_does_not_stop_the_next(harness: Harness) -> None:
    harness.gateway.server_ok = False
    for group_id in ("g", "h"):
        harness.agents.group(group_id, [1.0, 0.0])
        assert harness.trainer.run_once()
    assert [body["version"] for body in harness.gateway.announced] == [1, 2]
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_version_whose_number_is_taken_is_not_published(harness: Harness) -> None:
    harness.gateway.conflict = True
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}


def published(make_harness: MakeHarness, **gateway: object) -> list[int]:
    """The versions on disk after five steps of a trainer that keeps two."""
    harness = make_harness(keep_policies=2).start()
    for name, value in gateway.items():
        setattr(harness.gateway, name, value)
    for index in range(5):
        harness.agents.group(f"g{index}", [1.0, 0.0])
        assert harness.trainer.run_once()
    return harness.store.versions()


def test_old_versions_are_removed_when_newer_ones_are_served(make_harness: MakeHarness) -> None:
    assert published(make_harness) == [4, 5]


def test_the_served_version_is_kept(make_harness: MakeHarness) -> None:
    assert published(make_harness, serving=2) == [2, 4, 5]


def test_the_version_that_is_served_next_is_kept(make_harness: MakeHarness) -> None:
    assert published(make_harness, serving=4, target=3) == [3, 4, 5]


def test_no_version_is_removed_while_the_gateway_does_not_say_which_it_needs(
    make_harness: MakeHarness,
) -> None:
    assert published(make_harness, speechless=True) == [1, 2, 3, 4, 5]


def test_a_fleet_that_serves_nothing_needs_no_old_version(make_harness: MakeHarness) -> None:
    assert published(make_harness, idle=True) == [4, 5]


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
    harness.step("e")
    assert {path.name for path in harness.settings.policies_dir.iterdir()} == {"v00000004", "v00000005"}


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


def test_the_training_goes_on_while_a_version_is_written(
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
    assert [body["version"] for body in harness.gateway.announced] == [2, 4]
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
    assert [body["version"] for body in harness.gateway.announced] == [1]


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


def test_what_a_publication_raises_reaches_the_training(
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
def test_large_weights_are_several_files_with_an_index(
    harness: Harness, tmp_path: Path, file_bytes: int
) -> None:
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
