"""Merged LoRA weights are rounded without a bias, so small changes reach the published weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner
from tests.support.trainer_service.same_training import differs_by
from trainer_service.model.export import stochastically_rounded
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

pytestmark = pytest.mark.numeric

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}
SMALL_STEP: dict[str, Any] = {"lr": 1e-5, "warmup_steps": 0}
TYPES = [torch.bfloat16, torch.float16]
SIGMAS = 6
"""A sum of many independent roundings is farther from its mean once in 10⁹ draws, and the draw is fixed."""


@pytest.fixture(scope="module")
def half_path(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in bfloat16."""
    from transformers import AutoModelForCausalLM

    path: Path = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def same_in_float32(half_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, in a file whose type holds merged weights without a rounding."""
    from transformers import AutoModelForCausalLM

    path: Path = tmp_path_factory.mktemp("full")
    AutoModelForCausalLM.from_pretrained(half_path, dtype=torch.float32).save_pretrained(path)
    return path


def one_small_step(make_learner: MakeLearner, path: Path, **settings: object) -> OneRankLearner:
    learner = make_learner(lora=LORA | settings, optimizer=SMALL_STEP, model_path=path)
    learner.learn(1)
    return learner


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].double().reshape(-1) for name in sorted(weights)])


def gap_above(values: Tensor) -> Tensor:
    """The distance from a value in bfloat16 to the next larger one in magnitude."""
    return torch.ldexp(torch.ones_like(values), torch.frexp(values)[1] - 8)


def test_a_small_change_of_the_adapters_survives_the_merge_into_bfloat16(
    make_learner: MakeLearner, half_path: Path, same_in_float32: Path
) -> None:
    base = flat(load_file(half_path / "model.safetensors"))
    change = flat(one_small_step(make_learner, same_in_float32).exported()) - base
    assert 0 < change.abs().median() < 0.1 * gap_above(base).median(), "much less than half a rounding step"

    def survives(**settings: object) -> float:
        published = flat(one_small_step(make_learner, half_path, **settings).exported())
        return float((published - base) @ change / (change @ change))

    variance = (change**2 * gap_above(base) * change.abs()).sum() / (change @ change) ** 2
    assert abs(survives() - 1) < SIGMAS * float(variance.sqrt())
    assert survives(merge_rounding="nearest") < 0.5


def test_the_same_weights_are_rounded_alike_in_versions_checkpoints_and_after_a_restart(
    make_learner: MakeLearner, half_path: Path, tmp_path: Path
) -> None:
    learner = make_learner(lora=LORA, optimizer=SMALL_STEP, model_path=half_path, checkpoint_hf=True)
    learner.learn(1)
    first = learner.exported()
    tag = saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=1))
    assert differs_by(load_file(tmp_path / "c" / tag / "model" / "model.safetensors"), first) == 0
    restarted = make_learner(lora=LORA, optimizer=SMALL_STEP, model_path=half_path)
    Checkpoints(tmp_path / "c", 2).restore(restarted.leader)
    assert differs_by(restarted.exported(), first) == 0
    assert differs_by(learner.exported(), first) == 0


def test_a_later_version_rounds_only_what_has_changed_differently(
    make_learner: MakeLearner, half_path: Path
) -> None:
    """The draws of two versions are the same, or most of the rounded weights would differ in each version."""
    learner = one_small_step(make_learner, half_path)
    base, first = flat(load_file(half_path / "model.safetensors")), flat(learner.exported())
    learner.learn(2)
    second = flat(learner.exported())
    rounded_away = (first != base).double().mean()
    assert 0 < (second != first).double().mean() < rounded_away


def test_a_checkpoint_loads_with_another_rounding(
    make_learner: MakeLearner, half_path: Path, tmp_path: Path
) -> None:
    learner = one_small_step(make_learner, half_path)
    saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=1))
    other = make_learner(lora=LORA | {"merge_rounding": "nearest"}, model_path=half_path)
    assert Checkpoints(tmp_path / "c", 2).restore(other.leader)
    assert differs_by(other.exported(), learner.exported()) > 0


COUNT = 1 << 16
"""How many values are rounded."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("at", [1.0, -1.0, 3.1e-3, -(2.0**-14), 2.0**-17])
@pytest.mark.parametrize("share", [2.0**-6, 0.3, 0.75])
def test_a_value_is_rounded_up_as_often_as_it_lies_between_its_neighbours(
    dtype: torch.dtype, at: float, share: float
) -> None:
    low = torch.tensor(at, dtype=dtype)
    high = torch.nextafter(low, torch.tensor(at * 2, dtype=dtype))
    value = low.float() + share * (high.float() - low.float())
    rounded = stochastically_rounded(value.expand(COUNT), dtype, seed=3)
    assert set(rounded.tolist()) == {float(low), float(high)}
    share = float((value - low.float()) / (high.float() - low.float()))
    wrong = float((rounded == high).double().mean()) - share
    assert abs(wrong) < SIGMAS * (share * (1 - share) / (COUNT)) ** 0.5


@pytest.mark.parametrize("dtype", TYPES)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.integers(0, 2**63 - 1))
def test_each_value_becomes_one_of_its_two_neighbours(
    dtype: torch.dtype, values: list[float], seed: int
) -> None:
    exact = torch.tensor(values, dtype=torch.float32)
    rounded = stochastically_rounded(exact, dtype, seed)
    assert torch.equal(rounded, stochastically_rounded(exact, dtype, seed))
    most = torch.finfo(dtype).max
    inside = exact.abs() <= most
    near = exact[inside].to(dtype)
    toward = torch.where(exact[inside] > near.float(), torch.inf, -torch.inf).to(dtype)
    other = torch.where(exact[inside] == near.float(), near, torch.nextafter(near, toward))
    assert bool(((rounded[inside] == near) | (rounded[inside] == other)).all())
    outside = exact[~inside]
    assert torch.equal(
        rounded[~inside], torch.where(outside.isinf(), outside, most * outside.sign()).to(dtype)
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_values_that_the_type_has_stay_as_they_are(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    rounded = stochastically_rounded(every.float(), dtype, seed=1)
    numbers = ~every.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), every[numbers].view(torch.int16))
    assert bool(rounded[~numbers].isnan().all())
