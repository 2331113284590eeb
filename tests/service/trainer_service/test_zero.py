"""Every stage of ZeRO on one rank learns the same, and exports, saves and refuses the same, also as
configured for CUDA. The learning rate of each step."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.long_cases import cases, in_turn
from tests.support.tolerances import BFLOAT16, ulps
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.random_rows import MakeLearner, row_of
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    differs_by,
    same_metrics,
)
from trainer_service.model import deepspeed_policy, rank_model
from trainer_service.model.checkpoint_layout import LayoutRefused
from trainer_service.model.optimizer import schedule_of
from trainer_service.model.settings import OptimizerSettings
from trainer_service.model.zero import deepspeed_config
from trainer_service.settings import TrainerSettings
from trainer_service.step.step_parts import StepRequest
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

pytestmark = pytest.mark.numeric
SCHEDULE = WELL_CONDITIONED | {"schedule": "cosine", "warmup_steps": 1, "total_steps": 4}
LORA = {"rank": 4, "alpha": 8.0}
HALF_ROUNDINGS = 12
"""The roundings of a bfloat16 gradient in two layers, with six in each."""


def deepspeed_config_on_cuda(settings: TrainerSettings, on_cuda: bool) -> dict[str, object]:
    assert not on_cuda
    return deepspeed_config(settings, on_cuda=True)


CUDA = "as configured for CUDA"
SAME = [
    *((1, stage, "") for stage in (0, 2, 3)),
    *((stage, stage, "activation_checkpointing") for stage in (1, 3)),
    (2, 2, "offload_optimizer"),
    (2, 2, CUDA),
]
MORE = [
    (stage, stage, way)
    for stage in (1, 2, 3)
    for way in ("activation_checkpointing", "offload_optimizer", CUDA)
]


@pytest.mark.parametrize(
    ("stage", "other", "way"), cases(SAME, long=[each for each in MORE if each not in SAME])
)
def test_every_stage_learns_what_stage_one_learns(
    make_learner: MakeLearner,
    untrained: Weights,
    monkeypatch: pytest.MonkeyPatch,
    stage: int,
    other: int,
    way: str,
) -> None:
    """And with settings that save memory, or as configured for CUDA, what it learns without."""
    one = make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED)
    if way == CUDA:
        for module in (deepspeed_policy, rank_model):
            monkeypatch.setattr(module, "deepspeed_config", deepspeed_config_on_cuda)
    saving = {way: True} if way not in ("", CUDA) else {}
    two = make_learner(zero_stage=other, optimizer=WELL_CONDITIONED, **saving)
    for seed in range(3):
        assert two.learn(seed) == same_metrics(one.learn(seed))
    assert_moved_alike(one.exported(), two.exported(), untrained)


@pytest.mark.parametrize("stage", cases([3], long=[0, 1, 2]))
def test_weights_that_are_not_finite_are_detected(make_learner: MakeLearner, stage: int) -> None:
    learner = make_learner(zero_stage=stage, optimizer={"lr": float("inf"), "warmup_steps": 0})
    learner.learn(1)
    assert not learner.leader.weights_are_finite()


@pytest.mark.parametrize(("stage", "offload"), in_turn([1, 2, 3], [True, False]))
def test_a_bfloat16_step_of_many_equal_micro_batches_is_that_of_one(
    make_learner: MakeLearner, stage: int, offload: bool
) -> None:
    """Each of 8 gradients is exactly an eighth of the one. Only their float32 sum is exact."""
    row = row_of(38)
    made = {
        "zero_stage": stage,
        "dtype": "bfloat16",
        "offload_optimizer": offload,
        "optimizer": WELL_CONDITIONED,
        "algorithm": {"max_tokens": len(row)},
        "share_prefixes": False,  # the rows are equal
    }
    one, many = make_learner(**made), make_learner(**made)
    norms = []
    for learner, count in ((one, 1), (many, 8)):
        rows = [replace(row, session_id=f"s{number}") for number in range(count)]
        norms.append(learner.leader.optimise(StepRequest(rows, 0, learner.settings.algorithm))["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=ulps(2))
    assert differs_by(one.exported(), many.exported()) == 0


@pytest.mark.parametrize("stage", cases([1, 3], long=[2]))
def test_bfloat16_learns_at_every_stage_that_keeps_float32_beside_it(
    make_learner: MakeLearner, untrained: Weights, stage: int
) -> None:
    full = make_learner(optimizer=WELL_CONDITIONED)
    half = make_learner(optimizer=WELL_CONDITIONED, zero_stage=stage, dtype="bfloat16")
    close = ulps(HALF_ROUNDINGS, unit=BFLOAT16)
    for seed in range(3):
        assert half.learn(seed)["grad_norm"] == pytest.approx(full.learn(seed)["grad_norm"], rel=close)
    assert_moved_alike(full.exported(), half.exported(), untrained, HALF_ROUNDINGS, steps=1, unit=BFLOAT16)
    assert differs_by(full.exported(), half.exported()) > 0


@pytest.mark.parametrize(
    "given",
    cases(
        [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 3, "lora": LORA}],
        long=[*({"zero_stage": stage} for stage in (2, 3)), {"zero_stage": 0, "lora": LORA}, {"lora": LORA}],
    ),
    ids=str,
)
def test_a_checkpoint_goes_on_bitwise(
    make_learner: MakeLearner, tmp_path: Path, given: dict[str, Any]
) -> None:
    straight = make_learner(optimizer=SCHEDULE, **given)
    straight.learn(1)
    saved_checkpoint(Checkpoints(tmp_path / "c", 2), straight.leader, RunState(step=1))
    resumed = make_learner(optimizer=SCHEDULE, **given)
    Checkpoints(tmp_path / "c", 2).restore(resumed.leader)
    assert differs_by(straight.exported(), resumed.exported()) == 0
    for seed in (2, 3):
        assert straight.learn(seed) == resumed.learn(seed)
    assert differs_by(straight.exported(), resumed.exported()) == 0


@pytest.mark.parametrize(
    ("saved", "read", "lora"), cases([(3, 1, None), (1, 3, LORA)], long=[(1, 2, None), (2, 3, None)])
)
def test_a_checkpoint_of_another_stage_is_converted(
    make_learner: MakeLearner, untrained: Weights, tmp_path: Path, saved: int, read: int, lora: Any
) -> None:
    before = make_learner(zero_stage=saved, optimizer=SCHEDULE, lora=lora)
    before.learn(1)
    tag = saved_checkpoint(Checkpoints(tmp_path / "c", 2), before.leader, RunState(step=1))
    files = sorted((path, path.read_bytes()) for path in (tmp_path / "c" / tag).rglob("*") if path.is_file())
    after = make_learner(zero_stage=read, optimizer=SCHEDULE, lora=lora)
    Checkpoints(tmp_path / "c", 2).restore(after.leader)
    assert differs_by(before.exported(), after.exported()) == 0
    for seed in (2, 3):
        assert after.learn(seed) == same_metrics(before.learn(seed))
    assert_moved_alike(before.exported(), after.exported(), untrained)
    assert [path.name for path in (tmp_path / "c").iterdir() if path.is_dir()] == [tag]
    assert files == sorted((path, path.read_bytes()) for path, _ in files)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"zero_stage": 0}, "saved at trainer.zero_stage 1, not 0"),
        ({"dtype": "bfloat16"}, "trained with trainer.dtype float32, not bfloat16"),
        ({"lora": {"rank": 2}}, "trained with trainer.lora None"),
    ],
)
def test_a_checkpoint_that_cannot_be_converted_is_refused_with_a_sentence(
    make_learner: MakeLearner, tmp_path: Path, given: dict[str, object], sentence: str
) -> None:
    tag = saved_checkpoint(Checkpoints(tmp_path / "c", 2), make_learner().leader, RunState(step=1))
    assert not (tmp_path / "c" / tag / "model").exists(), "no copy is served unless the settings say so"
    with pytest.raises(LayoutRefused, match=sentence):
        Checkpoints(tmp_path / "c", 2).restore(make_learner(**given).leader)


@pytest.mark.parametrize("stage", cases([3], long=[1]))
def test_a_checkpoint_can_be_served_as_it_is(
    make_learner: MakeLearner, tmp_path: Path, model_path: Path, stage: int
) -> None:
    from transformers import AutoModelForCausalLM

    learner = make_learner(zero_stage=stage, checkpoint_hf=True)
    learner.learn(1)
    tag = saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=1))
    served = tmp_path / "c" / tag / "model"
    assert {path.name for path in served.iterdir()} == {path.name for path in model_path.iterdir()}
    assert differs_by(load_file(served / "model.safetensors"), learner.exported()) == 0
    model = AutoModelForCausalLM.from_pretrained(served)
    assert torch.equal(model.model.norm.weight, learner.exported()["model.norm.weight"])
    (served / "model.safetensors").write_bytes(b"")
    with pytest.raises(Exception, match=r"model/model.safetensors is missing or does not have"):
        Checkpoints(tmp_path / "c", 2).restore(learner.leader)


WAYS = [
    {"zero_stage": 0, "dtype": "float32"},
    *({"zero_stage": stage, "dtype": dtype} for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")),
    {"zero_stage": 3, "dtype": "bfloat16", "offload_optimizer": True},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_deepspeed_accepts_the_configuration_for_cuda(imported: None, way: dict[str, Any]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = TrainerSettings(model_path=Path("m"), device="cuda", **way)
    accepted = DeepSpeedConfig(deepspeed_config(settings, on_cuda=True))
    partitions_gradients = settings.sharding_stage >= 2
    assert accepted.zero_config.stage == settings.sharding_stage
    # Without partitioned gradients, the engine refuses overlap together with steps of any number of passes.
    assert accepted.zero_config.overlap_comm == partitions_gradients
    assert accepted.zero_config.reduce_scatter == (way["dtype"] == "float32")
    assert accepted.bfloat16_config.enabled == (way["dtype"] == "bfloat16")
    assert not accepted.managed_gradient_accumulation


def test_a_model_is_made_while_the_one_before_it_is_freed(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed goes through the names of the former model. The collector may free it at any step of that."""
    from deepspeed.utils.debug import debug_extract_module_and_param_names

    former = [torch.nn.Linear(2, 2)]
    debug_extract_module_and_param_names(former[0])
    detach = weakref.finalize.detach

    def free_and_detach(finalizer: "weakref.finalize[..., Any]") -> object:
        former.clear()
        return detach(finalizer)

    monkeypatch.setattr(weakref.finalize, "detach", free_and_detach)
    make_learner()
    assert not former


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"warmup_steps": 0}, [1, 1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ({"schedule": "linear", "warmup_steps": 2, "total_steps": 6}, [0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
        (
            {"schedule": "linear", "warmup_steps": 0, "total_steps": 4, "min_lr_ratio": 0.2},
            [0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2],
        ),
        (
            {"schedule": "cosine", "warmup_steps": 1, "total_steps": 5, "min_lr_ratio": 0.1},
            [1, 0.86819805, 0.55, 0.23180195, 0.1, 0.1, 0.1],
        ),
    ],
)
def test_every_step_has_its_factor_of_the_rate(given: dict[str, object], expected: list[float]) -> None:
    factor = schedule_of(OptimizerSettings.model_validate(given))
    assert [factor(step) for step in range(7)] == pytest.approx(expected)


def test_the_policy_steps_by_its_schedule(make_learner: MakeLearner) -> None:
    still = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 0, "total_steps": 2}
    learner = make_learner(optimizer=still)
    before = learner.exported()
    learner.learn(1)
    moved = learner.exported()
    assert any((moved[name] != before[name]).any() for name in before)
    learner.learn(2)
    assert all((moved[name] == tensor).all() for name, tensor in learner.exported().items()), "the rate is 0"
