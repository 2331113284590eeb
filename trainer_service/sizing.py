"""Replaces each `auto` in the settings, once, before the model is loaded, by what fits into the memory.

settings ─▶ device ─┬─ CPU ─▶ float32, no checkpointing, 1024 tokens
                    └─ GPU ─▶ bfloat16, and the largest micro-batch that fits:

    memory of the GPU = reserve + what is kept between passes + chunk of logits + tokens · bytes of a token
                                  weights, gradients,
                                  optimizer, buckets

The bytes of a token are an upper bound for the decoders of transformers with gated layers (Llama, Mistral,
Qwen2, Qwen3). A test compares them with what torch keeps for the backward pass.
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

from rollout_queue.model_files import BrokenWeights, ModelFiles
from trainer_service.model.huggingface import refused_in_words
from trainer_service.model.logprob_head import CHUNK_SHARE
from trainer_service.model.settings import LORA_LEARNING_RATE, LoraSettings
from trainer_service.model.zero import wants_cuda
from trainer_service.settings import TrainerSettings

logger = logging.getLogger(__name__)

RESERVE = 0.1
"""The share of the memory that is left free, for fragments and for buffers of libraries."""
CONTEXT = 1.5e9
"""The bytes of the CUDA context and of NCCL's buffers."""
BUCKET = 500_000_000
"""The number of gradients that DeepSpeed reduces at once, by default."""
LIVE = 1_000_000_000
"""The number of weights that stage 3 keeps gathered, by default."""
ENOUGH_TOKENS, MOST_TOKENS, STEP = 8192, 16_384, 1024
"""Micro-batches of `ENOUGH_TOKENS` keep a GPU busy. `MOST_TOKENS` is the largest that is chosen, because the
trainer waits for a full micro-batch before it learns early. Choices are multiples of `STEP`."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that decide how much memory it takes. Widths are in values per token."""

    parameters: int
    adapters: int
    """The parameters of LoRA adapters; 0 without LoRA, where all parameters are trained."""
    layers: int
    hidden: int
    queries: int
    """The width of all heads together; `keys` is that of the key heads."""
    keys: int
    intermediate: int
    vocabulary: int

    @property
    def trained(self) -> int:
        return self.adapters or self.parameters


@dataclass(frozen=True)
class Partition:
    """How the training uses its GPUs."""

    ranks: int
    stage: int
    """The stage that DeepSpeed runs: ModelSettings.sharding_stage."""
    half: bool
    """Whether passes use bfloat16."""
    offloads_optimizer: bool = False
    keeps_reference: bool = False
    """Whether a copy of the base model stays on the GPUs."""
    has_critic: bool = False

    @property
    def share_of_weights(self) -> float:
        """The part of each weight that a rank keeps."""
        return 1 / self.ranks if self.stage == 3 else 1

    @property
    def value_bytes(self) -> int:
        return 2 if self.half else 4


class DoesNotFit(Exception):
    """The training takes more memory than the GPU has."""


@dataclass(frozen=True)
class Fit:
    """The choice, and the bytes that it was made from."""

    recomputes: bool
    max_tokens: int
    kept: float
    of_token: float


def fit(
    shape: ModelShape,
    use: Partition,
    memory: float,
    recomputes: bool | None = None,
    max_tokens: int | None = None,
    longest_row: int = 0,
) -> Fit:
    """Choose activation checkpointing and the tokens of a micro-batch, if they are None. Activations are kept
    if a GPU stays busy with the tokens that fit then, and the longest row fits as well.

    Raises DoesNotFit if less than a micro-batch of `STEP` tokens fits.
    """
    kept = kept_bytes(shape, use)
    room = memory * (1 - RESERVE - CHUNK_SHARE) - CONTEXT - kept
    fits = {each: room / token_bytes(shape, use, each) for each in (False, True)}
    if recomputes is None:
        recomputes = fits[False] < (max_tokens or max(ENOUGH_TOKENS, longest_row))
    of_token = token_bytes(shape, use, recomputes)
    if fits[recomputes] < (max_tokens or STEP):
        raise DoesNotFit(
            f"weights, gradients and optimizer take {kept / 1e9:.1f} GB on each GPU, and a micro-batch of "
            f"{max_tokens or STEP} tokens {(max_tokens or STEP) * of_token / 1e9:.1f} GB"
        )
    largest = min(MOST_TOKENS, int(fits[recomputes] // STEP * STEP))
    return Fit(recomputes, max_tokens or largest, kept, of_token)


def kept_bytes(shape: ModelShape, use: Partition) -> float:
    """The bytes on each GPU between two passes, and those of buffers whose size does not depend on tokens."""
    own = _trained_model_bytes(shape.parameters, shape.trained, use)
    critic = _trained_model_bytes(shape.parameters, shape.parameters, use) if use.has_critic else 0.0
    reference = use.value_bytes * shape.parameters * use.share_of_weights if use.keeps_reference else 0
    # The gradient of the head is summed in float32, and then converted.
    head = 0 if shape.adapters else (4 + use.value_bytes) * shape.vocabulary * shape.hidden
    return own + critic + reference + head


def _trained_model_bytes(parameters: int, trained: int, use: Partition) -> float:
    width, part = use.value_bytes, 1 / use.ranks
    weights = width * parameters * use.share_of_weights
    if use.stage == 3:
        weights += width * min(parameters, LIVE)
    # Gradients of bfloat16 are added up in float32. From stage 2 on, each rank keeps its part of them.
    gradients = 4 * trained * (part if use.stage >= 2 else 1)
    # AdamW keeps two values for each weight; from stage 1 on, DeepSpeed keeps the weight in float32, too.
    optimizer = 12 * trained * part if use.stage else 8 * trained
    if use.offloads_optimizer:
        optimizer, gradients = 0, gradients if use.stage < 2 else 0
    # Two buckets, because one is filled while the other is reduced, and one in float32 to reduce.
    buckets = min(trained, BUCKET) * (2 * width + 4) if use.stage else 0
    return weights + gradients + optimizer + buckets


def token_bytes(shape: ModelShape, use: Partition, recomputes: bool) -> float:
    """The bytes of activations for each token of a micro-batch, and of their gradients in one layer."""
    layer = _layer_bytes(shape, use.half)
    around = 10 * use.value_bytes * shape.hidden  # embeddings, last norm, and the head's input
    if recomputes:  # each layer keeps its input, and one layer at a time keeps all
        return shape.layers * use.value_bytes * shape.hidden + 2 * layer + around
    return (shape.layers + 1) * layer + around


def _layer_bytes(shape: ModelShape, half: bool) -> int:
    """What one layer keeps for the backward pass: the norms' inputs in float32 and their outputs, queries and
    keys before and after norm and rotation, values, the attention's output, and four values of the MLP. In
    float32, attention on CUDA also keeps keys and values that are repeated for each query head."""
    if half:
        return 16 * shape.hidden + 13 * shape.queries + 11 * shape.keys + 8 * shape.intermediate
    return 24 * shape.hidden + 29 * shape.queries + 17 * shape.keys + 16 * shape.intermediate


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
