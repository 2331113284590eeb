"""A trainer by commands loads no checkpoint over another base model than its own, whatever the paths are."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rollout_queue.commands.command import LoadWeights, SaveWeights
from rollout_queue.commands.result import CommandFailed, Saved, WeightsLoaded
from tests.support.trainer_service.command_harness import (
    CommandHarness,
    MakeCommandHarness,
    created,
    learn,
    step,
)
from trainer_service.commands.live_model import RECORD
from trainer_service.model.sharding.layout import LayoutRefused

pytestmark = pytest.mark.numeric


def trained_further(model_path: Path) -> None:
    """Another model at the same path: each weight has changed a little."""
    path = model_path / "model.safetensors"
    save_file({name: tensor * 1.001 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def copy_of(model_path: Path, to: Path) -> Path:
    return Path(shutil.copytree(model_path, to))


def trained(make_command_harness: MakeCommandHarness, base: Path) -> CommandHarness:
    """A trainer over this base model, whose model a has made a step."""
    harness = make_command_harness(base=base)
    for command in (created(), learn(1), step()):
        harness.send("a", command)
    return harness


def test_a_checkpoint_belongs_to_its_base_model_and_not_to_its_path(
    make_command_harness: MakeCommandHarness, model_path: Path, tmp_path: Path
) -> None:
    base = copy_of(model_path, tmp_path / "base")
    harness = trained(make_command_harness, base)
    assert isinstance(harness.send("a", SaveWeights("x")), Saved)
    harness.stop()
    moved = make_command_harness(log=harness.log, base=copy_of(base, tmp_path / "moved"))
    assert moved.send("b", LoadWeights("a", "x", True)) == WeightsLoaded()
    for path in harness.settings.checkpoint_dir.iterdir():  # only what users have saved is left
        if path.name != "saved":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    trained_further(base)
    other = make_command_harness(log=harness.log, base=base)
    refused = other.send("c", LoadWeights("a", "x", True))
    assert isinstance(refused, CommandFailed)
    assert "checkpoint x is of another base model" in refused.error


def test_a_trainer_does_not_go_on_over_another_base_model(
    make_command_harness: MakeCommandHarness, model_path: Path, tmp_path: Path
) -> None:
    base = copy_of(model_path, tmp_path / "base")
    harness = trained(make_command_harness, base)
    harness.stop()
    trained_further(base)
    with pytest.raises(LayoutRefused, match="models over another base model"):
        make_command_harness(log=harness.log, base=base)
    for record in harness.settings.checkpoint_dir.rglob(RECORD):  # those of an older build have no digest
        record.write_bytes(record.read_bytes().replace(b'"base_digest"', b'"none_digest"'))
    assert make_command_harness(log=harness.log, base=base).trainer.executor.model_ids == {"a"}
