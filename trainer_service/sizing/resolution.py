"""Replaces each `auto` in the settings, once, before the model is loaded.

settings ─▶ device ─┬─ CPU ─▶ float32, no checkpointing, 1024 tokens
                    └─ GPU ─▶ bfloat16, and what fits into its memory (sizing/memory.py)
"""

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout_queue.base_model.headers import BrokenWeights
from rollout_queue.base_model.model_files import ModelFiles
from trainer_service.model.huggingface import refused_in_words
from trainer_service.model.settings import LORA_LEARNING_RATE, LoraSettings
from trainer_service.model.sharding.zero import wants_cuda
from trainer_service.settings import TrainerSettings
from trainer_service.sizing.memory import DoesNotFit, ModelShape, Partition, fit

logger = logging.getLogger(__name__)

SLOW_LORA_RATE = 1e-5
LAYER = re.compile(r"\.\d+\.")
"""In the names of tensors that belong to a layer."""


@dataclass(frozen=True)
class Gpu:
    """One of the GPUs that train. All of them should be alike."""

    name: str
    memory: float
    """In bytes."""
    multiplies_bfloat16: bool
    """Whether its matrix units take bfloat16, as they do since Ampere."""


def find_gpu(settings: TrainerSettings) -> Gpu | None:
    """The GPU of this process; None if it trains on CPU."""
    if not wants_cuda(settings):
        return None
    index = int(os.environ.get("LOCAL_RANK", "0"))
    facts = torch.cuda.get_device_properties(index)
    return Gpu(facts.name, facts.total_memory, facts.major >= 8)


def resolved(settings: TrainerSettings, gpu: Gpu | None, ranks: int) -> TrainerSettings:
    """The settings without `auto`. Logs what was chosen.

    Raises SystemExit if the training does not fit into the memory of the GPU.
    """
    if gpu is None:
        chosen = _concrete(settings, {})
    else:
        half = gpu.multiplies_bfloat16 and settings.zero_stage > 0
        dtype = ("bfloat16" if half else "float32") if settings.dtype == "auto" else settings.dtype
        chosen = _fitted(settings.model_copy(update={"dtype": dtype}), gpu, ranks)
    logger.info(
        "trains on %s in %s, in micro-batches of %d tokens, %s",
        f"{gpu.name} with {gpu.memory / 1e9:.1f} GB" if gpu else "CPU",
        chosen.dtype,
        chosen.algorithm.max_tokens,
        "recomputes activations" if chosen.activation_checkpointing else "keeps activations",
    )
    if chosen.lora is not None and chosen.optimizer.lr < SLOW_LORA_RATE:
        logger.warning(
            "trainer.optimizer.lr is %g: adapters hardly learn below %g; their default is %g",
            chosen.optimizer.lr,
            SLOW_LORA_RATE,
            LORA_LEARNING_RATE,
        )
    return chosen


def _fitted(settings: TrainerSettings, gpu: Gpu, ranks: int) -> TrainerSettings:
    """The settings, with a choice that fits into the memory for each `auto`."""
    algorithm = settings.algorithm
    recomputes, tokens = settings.activation_checkpointing, algorithm.max_tokens
    if "auto" not in (recomputes, tokens):
        return settings
    shape = shape_of(settings.model_path, settings.lora)
    try:
        found = fit(
            shape,
            partition_of(settings, ranks),
            gpu.memory,
            None if recomputes == "auto" else recomputes,
            None if tokens == "auto" else tokens,
            algorithm.max_row_tokens or 0,
        )
    except DoesNotFit as error:
        raise SystemExit(
            f"trainer: {settings.model_path} does not fit into {gpu.name} with {gpu.memory / 1e9:.1f} GB, of "
            f"which a tenth stays free: {error}. {_advice(settings, ranks)}"
        ) from error
    logger.info(
        "%.1fB parameters: %.1f GB on each of %d GPUs, and %.2f MB for each token of a micro-batch",
        shape.parameters / 1e9,
        found.kept / 1e9,
        ranks,
        found.of_token / 1e6,
    )
    return _concrete(settings, {"activation_checkpointing": found.recomputes}, found.max_tokens)


def partition_of(settings: TrainerSettings, ranks: int) -> Partition:
    """How a training with these settings uses its GPUs."""
    needs_copy = settings.algorithm.needs_reference_logprobs and settings.lora is None
    return Partition(
        ranks,
        settings.sharding_stage,
        settings.precision == "bfloat16",
        settings.offload_optimizer,
        needs_copy and not settings.reference_offload,
        settings.critic is not None,
    )


def _advice(settings: TrainerSettings, ranks: int) -> str:
    ways = [
        *(["zero_stage: 3"] if settings.zero_stage < 3 and ranks > 1 else []),
        "more GPUs" if ranks == 1 else f"more GPUs than {ranks}",
        *([] if settings.offload_optimizer else ["offload_optimizer: true"]),
        *([] if settings.lora else ["lora: {}"]),
    ]
    return f"Give it {', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else f"Give it {ways[0]}"


def _concrete(
    settings: TrainerSettings, choice: Mapping[str, Any], max_tokens: int | None = None
) -> TrainerSettings:
    """The settings with this choice. Other `auto`s get the values of the CPU."""
    tokens = max_tokens or settings.algorithm.micro_batch_tokens
    values = {"dtype": settings.precision, "activation_checkpointing": settings.recomputes_activations}
    algorithm = settings.algorithm.model_copy(update={"max_tokens": tokens})
    return settings.model_copy(update={**values, **choice, "algorithm": algorithm})


def shape_of(path: Path, lora: LoraSettings | None = None) -> ModelShape:
    """Read the shape of a model from its configuration and the headers of its weights."""
    from transformers import AutoConfig

    shapes = _tensor_shapes(path)
    with refused_in_words(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()

    def said(name: str) -> int:
        """What the configuration says; of a number that differs between layers the largest; 0 if nothing."""
        try:
            values = [getattr(config, name, None)]
        except RuntimeError:
            layers = (config.per_layer_config[layer] for layer in range(config.num_hidden_layers))
            values = [getattr(layer, name, None) for layer in layers]
        return max((value for value in values if isinstance(value, int)), default=0)

    hidden, heads = said("hidden_size"), said("num_attention_heads") or 1
    head_width = said("head_dim") or hidden // heads
    dense = said("intermediate_size") or _widest(shapes)
    of_experts = said("moe_intermediate_size") * (said("num_experts_per_tok") or 1)
    return ModelShape(
        parameters=sum(map(math.prod, shapes.values())),
        adapters=_adapter_parameters(shapes, lora) if lora else 0,
        layers=said("num_hidden_layers"),
        hidden=hidden,
        queries=heads * head_width,
        keys=(said("num_key_value_heads") or heads) * head_width,
        intermediate=max(dense, of_experts),
        vocabulary=said("vocab_size"),
    )


def _widest(shapes: Mapping[str, Sequence[int]]) -> int:
    """The widest layer of a model that does not say it: one that is fused with others counts with them."""
    of_layers = (max(shape) for name, shape in shapes.items() if LAYER.search(name) and len(shape) == 2)
    return max(of_layers, default=0)


def _adapter_parameters(shapes: Mapping[str, Sequence[int]], lora: LoraSettings) -> int:
    """Of each linear layer with an adapter: rank · (inputs + outputs)."""
    count = 0
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight").rpartition(".")[2]
        linear = len(shape) == 2 and "embed" not in layer
        everywhere = lora.target_modules == "all-linear" and layer != "lm_head"
        if linear and (everywhere or layer in lora.target_modules):
            count += lora.rank * sum(shape)
    return count


def _tensor_shapes(path: Path) -> dict[str, Sequence[int]]:
    try:
        return {name: tensor.shape for name, (_, tensor) in ModelFiles.read(path).tensors.items()}
    except (BrokenWeights, OSError) as error:
        raise SystemExit(f"trainer.model_path: {path} cannot be trained: {error}") from error
