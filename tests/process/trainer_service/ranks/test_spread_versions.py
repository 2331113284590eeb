"""Two real ranks publish versions together: each keeps and writes about half of the weights."""

import hashlib
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollout_queue.contract.published_policy import MANIFEST, STABLE, Manifest
from rollout_server.weights.fetch import apply_delta
from rollout_server.weights.verify import ExpectedModel, read_manifest, verify_directory
from rollout_server.weights.weight_files import tensors_of
from tests.support.long_cases import cases
from tests.support.trainer_service.expert_models import made_experts
from tests.support.trainer_service.random_rows import MakeLearner, random_rows
from tests.support.trainer_service.rank_learning import saved_step
from tests.support.trainer_service.rank_pair import RankPair
from tests.support.trainer_service.rank_tasks import FULL, SLOW, WRITING, Task
from tests.support.waiting import wait_until

TWO_FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def version_of(policies: Path, version: int) -> Path:
    return policies / f"v{version:08d}"


def weight_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.safetensors"))


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def published(directory: Path) -> dict[str, str]:
    """The digest of each tensor of a version. Each tensor is in one file."""
    found = [
        tensors for path in directory.glob("*.safetensors") for tensors in digests(load_file(path)).items()
    ]
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize(("stage", "lora"), cases([(1, None), (3, {"rank": 2})], long=[(2, None), (3, None)]))
def test_two_ranks_publish_the_tensors_of_one_and_each_holds_half(
    pair: RankPair, make_learner: MakeLearner, model_path: Path, tmp_path: Path, stage: int, lora: object
) -> None:
    one = make_learner(zero_stage=stage, lora=lora, checkpoint_hf=True)
    task = Task(tmp_path / "run", one.settings, [random_rows(1, 5)], publishes=[0, 1])
    told = pair.learn(task)
    first, second = version_of(task.policies, 0), version_of(task.policies, 1)
    whole = one.exported()
    assert published(first) == digests(whole)
    (checkpoint,) = (task.run / "checkpoints").glob("*/model")
    assert published(second) == digests(load_file(checkpoint / "model.safetensors"))
    assert published(second) != published(first)
    total = sum(tensor.nbytes for tensor in whole.values())
    assert sum(told.held) == total
    assert max(told.held) < 0.51 * total
    for number, version in enumerate((first, second)):
        manifest = read_manifest((version / MANIFEST).read_bytes(), number)
        verify_directory(version, manifest, ExpectedModel.of(model_path))
        assert weight_files(version) == TWO_FILES
    if lora is None:
        assert_changes_make_the_files(first, second, tmp_path)


def assert_changes_make_the_files(base: Path, version: Path, folder: Path) -> None:
    """A server makes the files of all ranks of their changes."""
    manifest = msgspec.json.decode((version / MANIFEST).read_bytes(), type=Manifest)
    specs = {spec.name: spec for spec in manifest.files}
    assert manifest.delta is not None
    assert manifest.delta.base_version == 0
    assert sorted(file.target for file in manifest.delta.files) == TWO_FILES
    for file in manifest.delta.files:
        made = folder / file.target
        apply_delta(version / file.name, tensors_of(base), specs[file.target], made)
        assert made.read_bytes() == (version / file.target).read_bytes()


def test_two_ranks_publish_experts_under_the_names_of_their_file(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    """transformers fuses the experts of a layer. At stage 3 each fused tensor is gathered once for all."""
    file = made_experts("Qwen3Moe", tmp_path / "base")
    settings = make_learner(model_path=tmp_path / "base", zero_stage=3).settings
    task = Task(tmp_path / "run", settings, [], publishes=[0])
    pair.learn(task)
    assert published(version_of(task.policies, 0)) == digests(file)


def test_the_training_goes_on_while_another_rank_writes_slowly(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    """The version has the weights of its own step, although a later step has changed them since."""
    settings = make_learner(checkpoint_hf=True).settings
    slow = Task(tmp_path / "slow", settings, [random_rows(seed, 5) for seed in range(2)], publishes=[1])
    slow.run.mkdir()
    (slow.run / SLOW).touch()
    told = pair.begin(slow)
    wait_until(lambda: saved_step(slow.run) == 2)
    wait_until((slow.run / WRITING).exists)
    assert not version_of(slow.policies, 1).exists()
    (slow.run / SLOW).unlink()
    pair.end(told)
    first, second = (load_file(path) for path in sorted(slow.run.glob("checkpoints/*/model/*.safetensors")))
    assert published(version_of(slow.policies, 1)) == digests(first) != digests(second)


def test_a_full_disk_of_another_rank_delays_the_version(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    task = Task(
        tmp_path / "run", make_learner(checkpoint_hf=True).settings, [random_rows(1, 5)], publishes=[1]
    )
    task.run.mkdir()
    (task.run / FULL).touch()
    assert pair.learn(task).refusals == 1
    (checkpoint,) = (task.run / "checkpoints").glob("*/model")
    version = version_of(task.policies, 1)
    assert published(version) == digests(load_file(checkpoint / "model.safetensors"))
    assert [path.name for path in task.policies.iterdir()] == [version.name]
    assert weight_files(version) == TWO_FILES, "nothing is left of the attempt that failed"


def test_a_rank_that_dies_while_it_writes_ends_the_trainer_and_the_restart_writes_the_version(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    """Rank 0 notices it by itself: nobody else ends it."""
    settings, steps = make_learner().settings, [random_rows(1, 5)]
    task = Task(tmp_path / "run", settings, steps, publishes=[1], may_fail=True)
    task.run.mkdir()
    (task.run / SLOW).touch()
    told = pair.begin(task)
    wait_until((task.run / WRITING).exists, 300)
    pair.ranks(told)[1].kill()
    assert pair.ended(told) == [1, -signal.SIGKILL]
    assert not told.exists()
    assert [path.name for path in task.policies.iterdir()] == ["v00000001.tmp"]
    (task.run / SLOW).unlink()
    pair.learn(Task(task.run, task.settings, task.steps, publishes=[1]))
    assert [path.name for path in task.policies.iterdir()] == ["v00000001"]
    assert (version_of(task.policies, 1) / STABLE).exists()
    assert weight_files(version_of(task.policies, 1)) == TWO_FILES


def test_ranks_without_a_common_disk_leave_the_whole_version_to_rank_0(
    pair: RankPair, make_learner: MakeLearner, tmp_path: Path
) -> None:
    one = make_learner()
    task = Task(tmp_path / "run", one.settings, [], publishes=[0], shares=False)
    told = pair.learn(task)
    version = version_of(task.directory_of(0) / "policies", 0)
    assert published(version) == digests(one.exported())
    assert weight_files(version) == ["model.safetensors"]
    assert told.held[1] == 0
    assert not (task.directory_of(1) / "policies").exists()
