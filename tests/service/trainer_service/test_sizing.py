"""What `auto` stands for on CPU and on GPUs of several sizes, and which training is refused."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.support.trainer_service.base_models import WEIGHTS
from tests.support.trainer_service.model_families import Family, made
from tests.support.trainer_service.random_rows import row_of
from trainer_service.__main__ import main
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import enable_activation_checkpointing
from trainer_service.model.logprob_head import set_head
from trainer_service.model.optimizer import make_optimizer
from trainer_service.model.packed_attention import Packing, set_attention
from trainer_service.rows.rows import micro_batches
from trainer_service.settings import TrainerSettings
from trainer_service.sizing import (
    MOST_TOKENS,
    STEP,
    DoesNotFit,
    Gpu,
    ModelShape,
    Partition,
    find_gpu,
    fit,
    kept_bytes,
    resolved,
    shape_of,
    token_bytes,
)

GB = 1e9
H100, T4 = (
    Gpu("NVIDIA H100 80GB HBM3", 84.9 * GB, True),
    Gpu("Tesla T4", 15.6 * GB, False),
)
QWEN3_8B = ModelShape(8_190_735_360, 0, 36, 4096, 4096, 1024, 12_288, 151_936)
QWEN3_600M = ModelShape(596_049_920, 0, 28, 1024, 2048, 1024, 3072, 151_936)


def half(ranks: int, stage: int = 2, **more: Any) -> Partition:
    return Partition(ranks, stage, half=True, **more)


def test_what_an_8b_model_keeps_on_8_gpus_is_the_sum_of_its_parts() -> None:
    p = QWEN3_8B.parameters
    buckets, head = 0.5 * GB * (2 + 2 + 4), 6 * 151_936 * 4096
    assert kept_bytes(QWEN3_8B, half(8)) == pytest.approx(2 * p + 4 * p / 8 + 12 * p / 8 + buckets + head)
    live = 2 * GB
    assert kept_bytes(QWEN3_8B, half(8, 3)) == pytest.approx(2 * p / 8 + live + 16 * p / 8 + buckets + head)
    for stage, share in ((2, 1), (3, 1 / 8)):
        with_reference = kept_bytes(QWEN3_8B, half(8, stage, keeps_reference=True))
        assert with_reference - kept_bytes(QWEN3_8B, half(8, stage)) == pytest.approx(2 * p * share)
    assert kept_bytes(QWEN3_8B, half(8, offloads_optimizer=True)) == pytest.approx(2 * p + buckets + head)
    assert kept_bytes(QWEN3_8B, half(8, has_critic=True)) > 1.8 * kept_bytes(QWEN3_8B, half(8))


def rows_of_the_page() -> list[list[str]]:
    """The cells of the page's table of results."""
    lines = (Path(__file__).parents[3] / "docs/gpu.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [each for each in cells if each[0] in ("0.6B", "8B")]


@pytest.mark.parametrize("cells", rows_of_the_page(), ids="-".join)
def test_the_page_has_what_is_chosen(cells: list[str]) -> None:
    name, ranks, memory, stage, kept, activations, tokens = cells
    shape, use = {"0.6B": QWEN3_600M, "8B": QWEN3_8B}[name], half(int(ranks), max(2, int(stage)))
    assert f"{kept_bytes(shape, use) / GB:.1f}" == kept
    if activations == "refused":
        with pytest.raises(DoesNotFit, match=f"take {kept} GB on each GPU, and a micro-batch of 1024 tokens"):
            fit(shape, use, float(memory) * GB)
        return
    found = fit(shape, use, float(memory) * GB)
    assert ("recomputed" if found.recomputes else "kept", str(found.max_tokens)) == (activations, tokens)
    taken = found.kept + found.max_tokens * found.of_token
    assert taken < 0.9 * float(memory) * GB, "a tenth stays free"


def test_no_more_tokens_than_the_chosen_fit() -> None:
    """Unless a choice is the largest, one step more would not fit."""
    for gib in range(40, 200, 4):
        found = fit(QWEN3_8B, half(8, 3), gib * 2**30)
        if found.max_tokens < MOST_TOKENS:
            with pytest.raises(DoesNotFit):
                fit(
                    QWEN3_8B,
                    half(8, 3),
                    gib * 2**30,
                    recomputes=found.recomputes,
                    max_tokens=found.max_tokens + STEP,
                )


def test_what_the_user_set_is_kept() -> None:
    assert fit(QWEN3_8B, half(8), 84.9 * GB, max_tokens=2000).recomputes is False
    assert fit(QWEN3_8B, half(8), 84.9 * GB, max_tokens=5000).recomputes is True
    assert fit(QWEN3_8B, half(8), 84.9 * GB, recomputes=False).max_tokens == 3 * STEP
    # Activations of 12,000 tokens fit, but not those of the longest row.
    assert fit(QWEN3_600M, half(1), 60 * GB).recomputes is False
    assert fit(QWEN3_600M, half(1), 60 * GB, longest_row=30_000).recomputes is True


def settings_of(model_path: Path, **given: Any) -> TrainerSettings:
    return TrainerSettings(model_path=model_path, **given)


def test_on_cpu_auto_stands_for_float32_without_checkpointing_and_1024_tokens(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = resolved(settings_of(model_path), None, ranks=1)
    assert (found.dtype, found.activation_checkpointing, found.algorithm.max_tokens) == (
        "float32",
        False,
        1024,
    )
    assert "trains on CPU in float32, in micro-batches of 1024 tokens, keeps activations" in caplog.text
    given = {"dtype": "bfloat16", "activation_checkpointing": True, "algorithm": {"max_tokens": 7}}
    assert resolved(settings_of(model_path, **given), None, 1) == settings_of(model_path, **given)


@pytest.mark.parametrize(
    ("gpu", "stage", "dtype"), [(H100, 1, "bfloat16"), (H100, 0, "float32"), (T4, 1, "float32")]
)
def test_on_a_gpu_auto_is_bfloat16_where_gpu_and_stage_support_it(
    model_path: Path, caplog: pytest.LogCaptureFixture, gpu: Gpu, stage: int, dtype: str
) -> None:
    caplog.set_level(logging.INFO)
    found = resolved(settings_of(model_path, zero_stage=stage), gpu, ranks=1)
    assert (found.dtype, found.activation_checkpointing) == (dtype, False)
    assert found.algorithm.max_tokens == MOST_TOKENS
    assert f"trains on {gpu.name} with {gpu.memory / 1e9:.1f} GB in {dtype}, in micro-batches" in caplog.text


@pytest.mark.parametrize(
    ("given", "rate", "warns"),
    [
        ({}, 1e-6, False),
        ({"lora": {}}, 1e-4, False),
        ({"lora": {}, "optimizer": {"warmup_steps": 2}}, 1e-4, False),
        ({"lora": {}, "optimizer": {"lr": 3e-4}}, 3e-4, False),
        ({"lora": {}, "optimizer": {"lr": 1e-6}}, 1e-6, True),
        ({"optimizer": {"lr": 1e-7}}, 1e-7, False),
    ],
)
def test_adapters_have_a_learning_rate_of_their_own(
    model_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], rate: float, warns: bool
) -> None:
    critic = {"critic": {"optimizer": {"beta1": 0.8}}, "algorithm": {"advantage": "gae"}}
    settings = settings_of(model_path, **critic, **given)
    found = resolved(settings, None, ranks=1)
    assert make_optimizer([torch.nn.Parameter(torch.zeros(1))], found).param_groups[0]["lr"] == rate
    assert found.critic is not None
    assert found.critic.optimizer.lr == 1e-5
    assert ("adapters hardly learn below 1e-05; their default is 0.0001" in caplog.text) is warns


def test_a_gpu_leaves_the_users_settings_alone(model_path: Path) -> None:
    given = {"dtype": "float32", "activation_checkpointing": True, "algorithm": {"max_tokens": 7}}
    assert resolved(settings_of(model_path, **given), H100, 1) == settings_of(model_path, **given)


def test_a_model_that_does_not_fit_is_refused_with_what_would_help(model_path: Path, tmp_path: Path) -> None:
    tiny = Gpu("a tiny GPU", 1.6 * GB, True)
    with pytest.raises(SystemExit) as refused:
        resolved(settings_of(model_path), tiny, ranks=1)
    sentence = str(refused.value)
    assert f"{model_path} does not fit into a tiny GPU with 1.6 GB, of which a tenth stays free" in sentence
    assert sentence.endswith("Give it more GPUs, offload_optimizer: true or lora: {}")
    with pytest.raises(SystemExit, match=r"Give it zero_stage: 3, more GPUs than 2 or lora: {}$"):
        resolved(settings_of(model_path, offload_optimizer=True), tiny, ranks=2)


def test_the_trainer_finds_its_gpu_and_refuses_before_it_loads_anything(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(name="a tiny GPU", total_memory=1.6 * GB, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: facts}.__getitem__)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("WEIR_TRAINER__DEVICE", "cuda")
    monkeypatch.setenv("WEIR_MODEL_PATH", str(model_path))
    with pytest.raises(SystemExit, match="does not fit into a tiny GPU"):
        main([])
    assert find_gpu(settings_of(model_path, device="cpu")) is None


def test_a_policy_on_cuda_refuses_an_auto_that_nobody_replaced(model_path: Path) -> None:
    with pytest.raises(ValueError, match="must replace each auto"):
        DeepSpeedPolicy(settings_of(model_path, device="cuda"))


def test_the_shape_is_read_from_the_files(model_path: Path, tmp_path: Path) -> None:
    embedding, layer = 64 * 32, 32 * (32 + 2 * 16 + 32) + 3 * 32 * 64 + 2 * 32 + 2 * 16
    assert shape_of(model_path) == ModelShape(embedding + 2 * layer + 32, 0, 2, 32, 32, 16, 64, 64)
    adapted = settings_of(model_path, lora={"rank": 3, "target_modules": ["q_proj", "down_proj"]}).lora
    assert shape_of(model_path, adapted).adapters == 2 * 3 * ((32 + 32) + (64 + 32))
    everything = settings_of(model_path, lora={"rank": 3}).lora
    sizes = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)
    assert shape_of(model_path, everything).trained == 2 * 3 * sizes
    made(Family("Llama", {"tie_word_embeddings": False}), tmp_path)
    of_head = settings_of(tmp_path, lora={"rank": 3, "target_modules": ["lm_head"]}).lora
    assert shape_of(tmp_path, of_head).adapters == 3 * (64 + 32)


@pytest.mark.parametrize(
    ("kind", "queries", "keys", "intermediate"),
    [
        ("gpt2", 768, 768, 111),
        ("opt", 768, 768, 111),
        ("bloom", 64, 64, 111),
        ("falcon", 4544, 4544, 111),
        ("gpt_neo", 2048, 2048, 111),
        ("mpt", 2048, 2048, 111),
        ("mamba", 768, 768, 1536),
        ("qwen3_5_moe", 4096, 512, 4096),
        ("gemma4", 4096, 2048, 9216),
    ],
)
def test_the_shape_of_a_kind_that_names_its_layers_in_another_way_is_an_estimate(
    tmp_path: Path, kind: str, queries: int, keys: int, intermediate: int
) -> None:
    transformers.CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    save_file({"h.0.mlp.weight": torch.ones(111, 5), "wte.weight": torch.ones(222, 5)}, tmp_path / WEIGHTS)
    shape = shape_of(tmp_path)
    assert (shape.queries, shape.keys, shape.intermediate) == (queries, keys, intermediate)
    assert (
        min(
            shape.layers, shape.hidden, shape.vocabulary, token_bytes(shape, Partition(1, 2, half=True), True)
        )
        > 0
    )


def kept_for_backward(model: Any, tokens: int) -> int:
    """The bytes that torch keeps of a pass for its backward pass, besides the weights."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    (batch,) = micro_batches([row_of(tokens)], tokens)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores(model, batch, Packing.SEGMENTS, torch.device("cpu"))
    return sum(each.untyped_storage().nbytes() for each in kept.values())


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_token_bound_what_torch_keeps(family: str, dtype: torch.dtype) -> None:
    """Widths in the proportions of Qwen3-8B, divided by 64."""
    shape = ModelShape(0, 0, 4, 64, 64, 16, 192, 64)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        sliding_window=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    set_attention(model)
    set_head(model)
    tokens = 96
    counted = token_bytes(shape, Partition(1, 2, dtype is torch.bfloat16), recomputes=False)
    # The count also has the gradients of one layer of the four.
    assert 0.55 * counted < kept_for_backward(model, tokens) / tokens < counted
    enable_activation_checkpointing(model.train())
    counted = token_bytes(shape, Partition(1, 2, dtype is torch.bfloat16), recomputes=True)
    assert kept_for_backward(model, tokens) / tokens < counted
