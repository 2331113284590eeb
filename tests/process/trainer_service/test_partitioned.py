"""At stage 3 of ZeRO, no rank holds a model: not while it loads, and not in a pass of the reference."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.long_cases import in_turn
from tests.support.tolerances import BFLOAT16, ulps
from tests.support.trainer_service import expert_models, model_families
from tests.support.trainer_service.loading_peaks import Peaks
from tests.support.trainer_service.random_rows import MakeLearner, random_rows
from tests.support.trainer_service.same_training import WELL_CONDITIONED, same_metrics
from trainer_service.model.huggingface import load_model
from trainer_service.model.zero import deepspeed_config, gathered
from trainer_service.settings import TrainerSettings
from trainer_service.step.step_parts import StepRequest
from weir.stack.services import launcher

LAYERS = 6
TYPES = [torch.float32, torch.bfloat16]
SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
FLOAT32 = 4
OBJECTS = 2**22
"""Python objects of a model: at most 32 KiB for each of at most 128 parameters and modules."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model that is too small to count, a dense one and one of experts. Their files are bfloat16, several
    for each."""
    root = tmp_path_factory.mktemp("models")
    made = {
        "first": transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**SHAPE | EXPERTS | {"hidden_size": 32, "num_hidden_layers": 1})
        ),
        "dense": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True)),
        "experts": transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS)),
    }
    for name, model in made.items():
        model.bfloat16().save_pretrained(root / name, max_shard_size="10MB")
    return [root / name for name in made]


def sizes_of(model: Path) -> tuple[int, int]:
    """How many bytes of float32 the whole model and one of its layers have."""
    whole = layer = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                size = file.get_tensor(name).numel() * FLOAT32
                whole += size
                layer += size if ".layers.0." in name else 0
    return whole, layer


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_holds_a_model(models: list[Path], ranks: int, tmp_path: Path) -> None:
    """The files are bfloat16 and the ranks train float32, so that whole weights would be anonymous memory."""
    command = [sys.executable, *launcher(ranks), "-m", "tests.support.trainer_service.loading_peaks"]
    path = os.pathsep.join(path for path in sys.path if path)
    # Freed memory above this size returns to the system at once, and is not counted.
    given = {"MALLOC_MMAP_THRESHOLD_": str(2**18), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run([*command, str(tmp_path), *map(str, models)], env=os.environ | given, check=True)
    of_ranks: list[Peaks] = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(ranks)]
    for model in models[1:]:
        whole, layer = sizes_of(model)
        most = {name: max(peaks[model.name][name] for peaks in of_ranks) for name in of_ranks[0][model.name]}
        figures = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in most.items())
        print(f"{ranks} ranks, {model.name} {whole / 2**20:.0f}, layer {layer / 2**20:.0f}: {figures} MiB")
        # A pass holds a gathered layer, and the buffer that it was gathered into.
        assert most.pop("passes") <= 2 * layer + OBJECTS
        assert most.keys() == {"policy", "critic", "reference"}
        loaded = 1.2 * whole / ranks + layer + OBJECTS
        assert most.pop("policy") <= loaded + layer, "a policy makes passes that check its model"
        assert max(most.values()) <= loaded


def assert_loaded_alike(model: Path, dtype: torch.dtype) -> None:
    """Assert that the partitioned model has bit for bit the weights and buffers of the whole one."""
    settings = TrainerSettings(
        model_path=model, zero_stage=3, dtype=str(dtype).removeprefix("torch."), device="cpu"
    )
    parted = load_model(model, dtype, zero_config=deepspeed_config(settings, on_cuda=False))
    whole = load_model(model, dtype)
    assert [name for name, _ in parted.named_parameters()] == [name for name, _ in whole.named_parameters()]
    for one, other in zip(parted.parameters(), whole.parameters(), strict=True):
        assert one.numel() == 0
        with gathered([one]):
            assert one.requires_grad == other.requires_grad
            assert torch.equal(one, other.to(dtype))
    for (name, one), (_, other) in zip(parted.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("name", "dtype"), in_turn(list(expert_models.FAMILIES), TYPES))
def test_experts_load_in_parts_as_they_load_whole(
    imported: None, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    expert_models.made_experts(name, tmp_path)
    assert_loaded_alike(tmp_path, dtype)


@pytest.mark.parametrize(("index", "dtype"), in_turn(range(len(model_families.FAMILIES)), TYPES))
def test_models_load_in_parts_as_they_load_whole(
    imported: None, tmp_path: Path, index: int, dtype: torch.dtype
) -> None:
    model = model_families.made(model_families.FAMILIES[index], tmp_path)
    if dtype is torch.float32:  # from files in bfloat16
        model.bfloat16().save_pretrained(tmp_path)
    assert_loaded_alike(tmp_path, dtype)


def test_a_head_that_the_configuration_ties_and_the_file_does_not_loads_in_parts_as_it_loads_whole(
    imported: None, model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    tensors = load_file(model_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_loaded_alike(tmp_path, torch.float32)


def within_a_rounding(said: Mapping[str, float]) -> Any:
    return pytest.approx(said, rel=ulps(1, unit=BFLOAT16), abs=ulps(1, unit=BFLOAT16))


@pytest.mark.numeric
def test_parts_in_bfloat16_learn_what_whole_models_learn(make_learner: MakeLearner) -> None:
    """On one rank, the parts of policy, critic and reference are the weights: passes are rounded alike, and
    only the sums of the gradient are not. The second step begins with weights that may differ by one rounding
    of bfloat16."""
    made: dict[str, Any] = {
        "dtype": "bfloat16",
        "critic": {"optimizer": WELL_CONDITIONED},
        "optimizer": WELL_CONDITIONED,
        "algorithm": {"advantage": "gae", "kl": {"coefficient": 0.1}},
    }
    whole, parted = make_learner(zero_stage=2, **made), make_learner(zero_stage=3, **made)
    for step, alike in enumerate((same_metrics, within_a_rounding)):
        rows = [replace(row, rewards_L=row.mask_L * 1.0) for row in random_rows(step, 5)]
        of_whole, of_parted = (
            each.leader.optimise(StepRequest(rows, 0, each.settings.algorithm)) for each in (whole, parted)
        )
        assert of_parted == alike(of_whole)
    assert of_parted["kl/reference"] > 0
