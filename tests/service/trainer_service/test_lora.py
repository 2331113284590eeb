"""LoRA: adapters learn, the base model stays unchanged, and the published weights are the sum of both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.long_cases import cases
from tests.support.tolerances import ulps
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.model_families import Family, made
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner, random_rows
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    differs_by,
)
from trainer_service.model import policy
from trainer_service.model.sharding.zero import deepspeed_config
from trainer_service.rows.rows import MicroBatch, micro_batches
from trainer_service.settings import TrainerSettings
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

pytestmark = pytest.mark.numeric

LORA = {"rank": 4, "alpha": 8.0}


def a_batch() -> MicroBatch:
    (batch,) = micro_batches(random_rows(9, 3), 1000)
    return batch


def base_weights(learner: OneRankLearner) -> dict[str, torch.Tensor]:
    named = learner.policy.module.named_parameters()
    return {name: getattr(p, "ds_tensor", p).detach().clone() for name, p in named if "lora" not in name}


@pytest.mark.parametrize("stage", cases([1, 3], long=[0]))
def test_only_adapters_learn_and_the_merged_model_agrees_with_the_policy(
    make_learner: MakeLearner, model_path: Path, tmp_path: Path, stage: int
) -> None:
    learner = make_learner(zero_stage=stage, lora=LORA, checkpoint_hf=True)
    base = base_weights(learner)
    for seed in range(2):
        learner.learn(seed)
    saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=2))
    merged = learner.exported()
    after = base_weights(learner)
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    assert differs_by(merged, load_file(model_path / "model.safetensors")) > 1e-4
    served = make_learner(model_path=next((tmp_path / "c").glob("*/model")))
    with torch.no_grad():
        said, _ = learner.policy.logprobs(a_batch())
        again, _ = served.policy.logprobs(a_batch())
    # With separate adapters, each of about 16 products in two layers is rounded once more.
    torch.testing.assert_close(said, again, atol=ulps(16, of=float(said.abs().max())), rtol=0)


def without_small_weights(settings: TrainerSettings, on_cuda: bool) -> dict[str, Any]:
    """Stage 3 keeps no weight on every rank, as it would those of tiny models."""
    config: dict[str, Any] = deepspeed_config(settings, on_cuda)
    return config | {
        "zero_optimization": config["zero_optimization"] | {"stage3_param_persistence_threshold": 0}
    }


@pytest.mark.parametrize("stage", cases([3], long=[0, 1]))
def test_a_head_that_is_named_is_adapted_and_merged(
    make_learner: MakeLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(policy, "deepspeed_config", without_small_weights)
    made(Family("Llama", {"tie_word_embeddings": False}), tmp_path / "base")
    lora = LORA | {"target_modules": ["q_proj", "lm_head"]}
    learner = make_learner(model_path=tmp_path / "base", zero_stage=stage, lora=lora, checkpoint_hf=True)
    with torch.no_grad():
        untrained, _ = learner.policy.logprobs(a_batch())
    for seed in range(2):
        learner.learn(seed)
    saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=2))
    merged, base = learner.exported(), load_file(tmp_path / "base" / "model.safetensors")
    changed = {name for name, tensor in base.items() if not torch.equal(merged[name], tensor)}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "lm_head"}
    served = make_learner(model_path=next((tmp_path / "c").glob("*/model")))
    with torch.no_grad():
        said, _ = learner.policy.logprobs(a_batch())
        again, _ = served.policy.logprobs(a_batch())
        reference = learner.policy.reference(a_batch())
    # With separate adapters, each of about 16 products in two layers and the head is rounded once more.
    torch.testing.assert_close(said, again, atol=ulps(24, of=float(said.abs().max())), rtol=0)
    torch.testing.assert_close(reference, untrained, atol=ulps(1, of=float(untrained.abs().max())), rtol=0)


def test_a_head_that_is_tied_cannot_be_merged_and_is_refused(make_learner: MakeLearner) -> None:
    with pytest.raises(SystemExit, match=r"lm_head\.weight"):
        make_learner(lora={**LORA, "target_modules": ["q_proj", "lm_head"]})


def test_peft_reads_the_adapter_of_a_checkpoint(
    make_learner: MakeLearner, model_path: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learner = make_learner(lora={**LORA, "target_modules": ["q_proj", "down_proj"]})
    learner.learn(1)
    tag = saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=1))
    base = AutoModelForCausalLM.from_pretrained(model_path)
    merged = PeftModel.from_pretrained(base, tmp_path / "c" / tag / "adapter").merge_and_unload()
    weights = {name: tensor for name, tensor in merged.state_dict().items() if name != "lm_head.weight"}
    # Each weight is a sum of the base weight and `rank` products, in an order that may differ.
    assert differs_by(weights, learner.exported()) < ulps(
        LORA["rank"] + 1, of=max(float(tensor.abs().max()) for tensor in weights.values())
    )


@pytest.mark.parametrize("stage", cases([3], long=[0, 1]))
def test_adapters_go_on_bitwise_after_a_restore(
    make_learner: MakeLearner, tmp_path: Path, stage: int
) -> None:
    straight = make_learner(zero_stage=stage, lora=LORA)
    straight.learn(1)
    saved_checkpoint(Checkpoints(tmp_path / "c", 2), straight.leader, RunState(step=1))
    resumed = make_learner(zero_stage=stage, lora=LORA)
    Checkpoints(tmp_path / "c", 2).restore(resumed.leader)
    assert straight.learn(2) == resumed.learn(2)
    assert differs_by(straight.exported(), resumed.exported()) == 0


def test_adapters_are_converted_for_another_stage(
    make_learner: MakeLearner, untrained: Weights, tmp_path: Path
) -> None:
    before = make_learner(zero_stage=1, lora=LORA, optimizer=WELL_CONDITIONED)
    before.learn(1)
    saved_checkpoint(Checkpoints(tmp_path / "c", 2), before.leader, RunState(step=1))
    after = make_learner(zero_stage=3, lora=LORA, optimizer=WELL_CONDITIONED)
    Checkpoints(tmp_path / "c", 2).restore(after.leader)
    assert differs_by(before.exported(), after.exported()) == 0
    for learner in (before, after):
        learner.learn(2)
    assert_moved_alike(before.exported(), after.exported(), untrained)


@pytest.mark.parametrize(
    "given",
    cases(
        [{"lora": LORA}, {}, {"reference_offload": True}, {"zero_stage": 3}],
        long=[{"lora": LORA, "zero_stage": 3}, {"zero_stage": 3, "reference_offload": True}],
    ),
)
def test_the_reference_is_the_base_model_also_after_training_and_a_restore(
    make_learner: MakeLearner, tmp_path: Path, given: dict[str, object]
) -> None:
    with torch.no_grad():
        untrained, _ = make_learner().policy.logprobs(a_batch())
    learner = make_learner(**given)
    learner.learn(1)
    saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=1))
    again = make_learner(**given)
    Checkpoints(tmp_path / "c", 2).restore(again.leader)
    for each in (learner, again):
        reference = each.policy.reference(a_batch())
        # At stage 3 the same weights may lie elsewhere in memory, which may change a value by one rounding.
        torch.testing.assert_close(
            reference, untrained, atol=ulps(1, of=float(untrained.abs().max())), rtol=0
        )
        assert not reference.requires_grad
        assert float((each.policy.logprobs(a_batch())[0].detach() - reference).abs().max()) > 1e-3
    assert again.learn(2) == learner.learn(2)


def test_an_unknown_target_module_is_named(make_learner: MakeLearner) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        make_learner(lora={**LORA, "target_modules": ["nowhere"]})
