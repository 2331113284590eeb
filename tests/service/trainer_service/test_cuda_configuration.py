"""What the trainer tells DeepSpeed on CUDA is valid, and learns the same as what it tells on CPU."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.long_cases import cases
from tests.support.trainer_service.random_rows import MakeLearner
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    same_metrics,
)
from trainer_service.model import policy
from trainer_service.model.sharding.zero import deepspeed_config
from trainer_service.settings import TrainerSettings

pytestmark = pytest.mark.numeric

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


@pytest.mark.parametrize("stage", cases([2], long=[1, 3]))
def test_the_configuration_for_cuda_learns_the_same(
    make_learner: MakeLearner, untrained: Weights, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    plain = make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED)
    monkeypatch.setattr(policy, "deepspeed_config", deepspeed_config_on_cuda)
    overlapped = make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED)
    for seed in range(3):
        assert overlapped.learn(seed) == same_metrics(plain.learn(seed))
    assert_moved_alike(plain.exported(), overlapped.exported(), untrained)


def deepspeed_config_on_cuda(settings: TrainerSettings, on_cuda: bool) -> dict[str, object]:
    assert not on_cuda
    return deepspeed_config(settings, on_cuda=True)
