"""LoRA: adapters learn, and the base model stays unchanged. Published are the sum of both, rounded without
bias, or the adapter alone."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rollout_queue.contract.published_policy import MANIFEST, STABLE, Manifest
from rollout_server.settings import EngineLoraSettings
from rollout_server.weights.verify import ExpectedModel, verify_directory
from rollout_server.weights.weight_files import tensors_of
from tests.support.long_cases import cases, in_turn
from tests.support.tolerances import ulps
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.model_families import Family, made
from tests.support.trainer_service.model_kinds import make_kind
from tests.support.trainer_service.peft_models import peft_model
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner, random_rows
from tests.support.trainer_service.same_training import differs_by
from trainer_service.model import deepspeed_policy, rank_model
from trainer_service.model.base_weights import BaseWeights
from trainer_service.model.exported_tensors import check_tensor_names, stochastically_rounded
from trainer_service.model.huggingface import load_model
from trainer_service.model.lora import Adapters
from trainer_service.model.settings import LoraSettings
from trainer_service.model.zero import deepspeed_config
from trainer_service.rows.rows import MicroBatch, micro_batches
from trainer_service.settings import TrainerSettings
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

pytestmark = pytest.mark.numeric
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}


def a_batch() -> MicroBatch:
    (batch,) = micro_batches(random_rows(9, 3), 1000)
    return batch


def base_weights(learner: OneRankLearner) -> dict[str, torch.Tensor]:
    named = learner.policy.module.named_parameters()
    return {name: getattr(p, "ds_tensor", p).detach().clone() for name, p in named if "lora" not in name}


def without_small_weights(settings: TrainerSettings, on_cuda: bool) -> dict[str, Any]:
    """Stage 3 keeps no weight on every rank, as it would those of tiny models."""
    config: dict[str, Any] = deepspeed_config(settings, on_cuda)
    return config | {
        "zero_optimization": config["zero_optimization"] | {"stage3_param_persistence_threshold": 0}
    }


@pytest.mark.parametrize(
    ("of_head", "stage"), cases([(False, 1), (True, 3)], long=[(False, 0), (False, 3), (True, 0), (True, 1)])
)
def test_only_adapters_learn_and_the_merged_model_agrees_with_the_policy(
    make_learner: MakeLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_head: bool, stage: int
) -> None:
    """Also that of the output head, if it is named; the reference stays the base model."""
    for module in (deepspeed_policy, rank_model):
        monkeypatch.setattr(module, "deepspeed_config", without_small_weights)
    made(Family("Llama", {"tie_word_embeddings": False}), tmp_path / "base")
    lora = LORA | ({"target_modules": ["q_proj", "lm_head"]} if of_head else {})
    learner = make_learner(model_path=tmp_path / "base", zero_stage=stage, lora=lora, checkpoint_hf=True)
    before = base_weights(learner)
    with torch.no_grad():
        untrained, _ = learner.policy.logprobs(a_batch())
    for seed in range(2):
        learner.learn(seed)
    saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=2))
    merged, base = learner.exported(), load_file(tmp_path / "base" / "model.safetensors")
    after = base_weights(learner)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    changed = {name.split(".")[-2] for name, tensor in base.items() if not torch.equal(merged[name], tensor)}
    layers = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert changed == ({"q_proj", "lm_head"} if of_head else layers)
    assert differs_by(merged, base) > 1e-4
    served = make_learner(model_path=next((tmp_path / "c").glob("*/model")))
    with torch.no_grad():
        said, _ = learner.policy.logprobs(a_batch())
        again, _ = served.policy.logprobs(a_batch())
        reference = learner.policy.reference(a_batch())
    # With separate adapters, each of about 16 products in two layers and the head is rounded once more.
    torch.testing.assert_close(said, again, atol=ulps(24, of=float(said.abs().max())), rtol=0)
    torch.testing.assert_close(reference, untrained, atol=ulps(1, of=float(untrained.abs().max())), rtol=0)


def test_peft_reads_a_checkpoints_adapter(
    make_learner: MakeLearner, model_path: Path, tmp_path: Path
) -> None:
    learner = make_learner(lora={**LORA, "target_modules": ["q_proj", "down_proj"]})
    learner.learn(1)
    tag = saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=1))
    merged = peft_model(model_path, tmp_path / "c" / tag / "adapter").merge_and_unload()
    weights = {name: tensor for name, tensor in merged.state_dict().items() if name != "lm_head.weight"}
    # Each weight is a sum of the base weight and `rank` products, in an order that may differ.
    assert differs_by(weights, learner.exported()) < ulps(
        LORA["rank"] + 1, of=max(float(tensor.abs().max()) for tensor in weights.values())
    )


@pytest.mark.parametrize(
    "given",
    cases(
        [{"lora": LORA}, {"reference_offload": True}, {"zero_stage": 3}],
        long=[{}, {"lora": LORA, "zero_stage": 3}, {"zero_stage": 3, "reference_offload": True}],
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


def test_a_target_that_is_unknown_or_a_tied_head_is_refused_by_name(make_learner: MakeLearner) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        make_learner(lora={**LORA, "target_modules": ["nowhere"]})
    with pytest.raises(SystemExit, match=r"lm_head\.weight"):
        make_learner(lora={**LORA, "target_modules": ["q_proj", "lm_head"]})


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
    """A checkpoint loads with another rounding, too."""
    learner = make_learner(lora=LORA, optimizer=SMALL_STEP, model_path=half_path, checkpoint_hf=True)
    learner.learn(1)
    first = learner.exported()
    tag = saved_checkpoint(Checkpoints(tmp_path / "c", 2), learner.leader, RunState(step=1))
    assert differs_by(load_file(tmp_path / "c" / tag / "model" / "model.safetensors"), first) == 0
    for rounding in ("stochastic", "nearest"):
        lora = LORA | {"merge_rounding": rounding}
        restarted = make_learner(lora=lora, optimizer=SMALL_STEP, model_path=half_path)
        assert Checkpoints(tmp_path / "c", 2).restore(restarted.leader)
        assert (differs_by(restarted.exported(), first) == 0) == (rounding == "stochastic")
    assert differs_by(learner.exported(), first) == 0


def test_a_later_version_rounds_alike_what_has_not_changed(
    make_learner: MakeLearner, half_path: Path
) -> None:
    """The draws of two versions are the same, or most of the rounded weights would differ in each version."""
    learner = one_small_step(make_learner, half_path)
    base, first = flat(load_file(half_path / "model.safetensors")), flat(learner.exported())
    learner.learn(2)
    second = flat(learner.exported())
    rounded_away = (first != base).double().mean()
    assert 0 < (second != first).double().mean() < rounded_away


COUNT = 1 << 16
"""How many values are rounded."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("at", "share"), in_turn([1.0, -1.0, 3.1e-3, -(2.0**-14), 2.0**-17], [2.0**-6, 0.3, 0.75])
)
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
def test_each_value_becomes_a_neighbour(dtype: torch.dtype, values: list[float], seed: int) -> None:
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


OPTIMIZER = {"lr": 1e-2, "warmup_steps": 0}


def adapted(make_harness: MakeHarness, **settings: object) -> Harness:
    return make_harness(transport="adapter", lora=LORA, optimizer=OPTIMIZER, **settings).start()


def manifest_of(directory: Path) -> Manifest:
    return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_version_is_an_adapter_that_a_rollout_server_takes(make_harness: MakeHarness, stage: int) -> None:
    harness = adapted(make_harness, zero_stage=stage)
    harness.step("g")
    directory = harness.store.path_of(1)
    names = {"adapter_config.json", "adapter_model.safetensors", MANIFEST, STABLE}
    assert {path.name for path in directory.iterdir()} == names
    manifest = manifest_of(directory)
    assert manifest.is_adapter
    for file in manifest.files:
        content = (directory / file.name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.size, file.sha256)
    model = ExpectedModel.of(harness.settings.model_path, EngineLoraSettings(max_rank=4))
    verify_directory(directory, manifest, model)


@pytest.mark.numeric
def test_the_base_with_the_published_adapter_is_what_was_trained(make_harness: MakeHarness) -> None:
    harness = adapted(make_harness)
    harness.step("g")
    harness.step("h")
    factors = load_file(harness.store.path_of(2) / "adapter_model.safetensors")
    assert any(float(factor.abs().max()) > 0 for name, factor in factors.items() if "lora_B" in name)
    merged = load_file(harness.settings.model_path / "model.safetensors")
    for name in [name for name in factors if ".lora_A." in name]:
        layer = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        delta = factors[name.replace("lora_A", "lora_B")] @ factors[name]
        merged[layer] = merged[layer] + LORA["alpha"] / LORA["rank"] * delta
    whole = {each.name: each.value for each in harness.policy.snapshot().tensors}
    assert merged.keys() == whole.keys()
    for name, tensor in whole.items():
        # A sum of the base and `rank` products, in an order that may differ.
        bound = ulps(LORA["rank"] + 2, of=float(tensor.abs().max()))
        torch.testing.assert_close(merged[name].float(), tensor.float(), atol=bound, rtol=0)


def test_whole_weights_are_published_once_every_server_refuses_an_adapter(make_harness: MakeHarness) -> None:
    harness = adapted(make_harness)
    harness.gateway.server_ok = False
    harness.step("g")
    harness.step("h")  # it hears meanwhile that version 1 was refused
    assert [manifest_of(harness.store.path_of(v)).is_adapter for v in (1, 2)] == [True, False]
    assert (harness.store.path_of(2) / "model.safetensors").exists()
    assert (harness.store.path_of(2) / "config.json").exists()
    harness.gateway.server_ok = True
    harness.step("i")
    assert not manifest_of(harness.store.path_of(3)).is_adapter


@pytest.mark.parametrize("has_results", [True, False])
def test_adapters_go_on_after_a_push_that_failed(
    make_harness: MakeHarness, caplog: pytest.LogCaptureFixture, has_results: bool
) -> None:
    """The server may take the next version: its disk was full, or it was starting again."""
    harness = adapted(make_harness)
    harness.gateway.server_ok = harness.gateway.refuses = False
    harness.gateway.has_results = has_results
    harness.step("g")
    harness.step("h")  # it hears meanwhile that the push of version 1 has failed
    assert manifest_of(harness.store.path_of(2)).is_adapter
    assert "no server took version 1" in caplog.text
    assert "version 1 is served" not in caplog.text


def test_a_weight_with_an_adapter_has_the_name_of_the_base_models_file(tmp_path: Path) -> None:
    """Mixtral's routers have another name there than in memory."""
    make_kind("mixtral", tmp_path)
    base, model = BaseWeights.checked(tmp_path), load_model(tmp_path, torch.float32)
    Adapters(model, LoraSettings(rank=2), tmp_path)
    published = {tensor.name: tensor.shape for tensor in base.published(model)}
    assert published == {name: stored.shape for name, (_, stored) in tensors_of(tmp_path).items()}
    check_tensor_names(model, base.dtypes, tmp_path)
