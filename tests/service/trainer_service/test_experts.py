"""Mixtures of experts: transformers fuses experts in memory; they are published under their file's names."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.support.long_cases import in_turn
from tests.support.trainer_service.expert_models import FAMILIES, made_experts
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner

pytestmark = pytest.mark.numeric


def loaded(learner: OneRankLearner, base: Path, directory: Path) -> dict[str, Tensor]:
    """The weights of a model that transformers loads of what the learner publishes."""
    directory.mkdir()
    (directory / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(learner.exported(), directory / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    return dict(model.state_dict())


@pytest.mark.parametrize(("family", "stage"), in_turn(list(FAMILIES), [1, 3]))
def test_experts_learn_and_are_published_under_the_names_of_their_file(
    make_learner: MakeLearner, tmp_path: Path, family: str, stage: int
) -> None:
    file = made_experts(family, tmp_path / "base")
    learner = make_learner(
        model_path=tmp_path / "base", zero_stage=stage, optimizer={"lr": 1e-2, "warmup_steps": 0}
    )
    first = learner.exported()
    assert first.keys() == file.keys()
    assert all(torch.equal(first[name], file[name]) for name in file)
    learner.learn(1)
    moved = {name for name, value in learner.exported().items() if not torch.equal(value, file[name])}
    assert any("experts" in name for name in moved)
    again = loaded(learner, tmp_path / "base", tmp_path / "published")
    if stage == 1:
        trained = learner.policy.module.state_dict()
        assert all(torch.equal(again[name], value) for name, value in trained.items())
