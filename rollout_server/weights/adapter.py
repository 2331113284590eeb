"""Checks a LoRA adapter in PEFT's layout before an engine loads it.

SGLang 0.5.23 accepts an adapter that has one half of a fused layer only, and its process dies at the first
call. It ignores the options that it does not know, such as rank-stabilised scaling, and would apply another
adapter than the one that was trained. So both are refused here.
"""

import re
from collections.abc import Mapping
from typing import Any

from rollout_queue.contract.published_policy import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollout_server.settings import EngineLoraSettings
from rollout_server.weights.safetensors_file import BrokenWeights, StoredTensor

TENSOR = re.compile(r"base_model\.model\.(?P<layer>[^ ]+)\.lora_(?P<factor>[AB])\.weight")
FUSED = (("q_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang fuses with each other: an adapter has both or none. `k_proj` may be missing."""
NOT_APPLIED = (
    "alpha_pattern",
    "bias",
    "fan_in_fan_out",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "use_dora",
    "use_rslora",
)
"""Options that change what an adapter computes, and that SGLang does not apply."""
OFF: tuple[Any, ...] = (None, False, "none", [], {})


def check_adapter(
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    lora: EngineLoraSettings,
) -> None:
    """Raises BrokenWeights unless the engine can apply the adapter to its model, whose tensors have
    `shapes`."""
    rank = _check_config(config, lora)
    layers: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        if (found := TENSOR.fullmatch(name)) is None:
            raise BrokenWeights("is no tensor of a LoRA adapter", file=ADAPTER_WEIGHTS, tensor=name)
        layer, factor = found["layer"], found["factor"]
        shape = shapes.get(f"{layer}.weight", ())
        if len(shape) != 2:
            raise BrokenWeights("its layer is not in the engine's model", file=ADAPTER_WEIGHTS, tensor=name)
        expected = (rank, shape[1]) if factor == "A" else (shape[0], rank)
        if tensor.shape != expected:
            reason = f"has shape {list(tensor.shape)}, the engine's model needs {list(expected)}"
            raise BrokenWeights(reason, file=ADAPTER_WEIGHTS, tensor=name)
        layers.setdefault(layer, set()).add(factor)
    _check_layers(layers, lora)


def _check_config(config: Mapping[str, Any], lora: EngineLoraSettings) -> int:
    """The adapter's rank."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA":
        raise BrokenWeights(f"peft_type is {config.get('peft_type')!r}, not 'LORA'", file=ADAPTER_CONFIG)
    if not isinstance(rank, int) or not 0 < rank <= lora.max_rank:
        reason = f"r is {rank!r}; the engine takes 1 to {lora.max_rank} (rollout_server.lora.max_rank)"
        raise BrokenWeights(reason, file=ADAPTER_CONFIG)
    if not isinstance(alpha, int | float) or not alpha > 0:
        raise BrokenWeights(f"lora_alpha is {alpha!r}, and not above 0", file=ADAPTER_CONFIG)
    if not isinstance(config.get("target_modules"), str | list):
        raise BrokenWeights("target_modules is missing", file=ADAPTER_CONFIG)
    for option in NOT_APPLIED:
        if config.get(option) not in OFF:
            raise BrokenWeights(
                f"{option} is {config[option]!r}, which SGLang does not apply", file=ADAPTER_CONFIG
            )
    return rank


def _check_layers(layers: Mapping[str, set[str]], lora: EngineLoraSettings) -> None:
    if not layers:
        raise BrokenWeights("has no tensors", file=ADAPTER_WEIGHTS)
    for layer, factors in layers.items():
        path, _, module = layer.rpartition(".")
        if module not in lora.target_modules:
            reason = f"adapts {layer}, and {module} is not in rollout_server.lora.target_modules"
            raise BrokenWeights(reason, file=ADAPTER_WEIGHTS)
        if factors != {"A", "B"}:
            raise BrokenWeights(f"has only one factor of {layer}", file=ADAPTER_WEIGHTS)
        for fused in FUSED:
            if module in fused or (module == "k_proj" and "q_proj" in fused):
                missing = [other for other in fused if f"{path}.{other}" not in layers]
                if missing:
                    reason = f"adapts {layer} without {missing[0]}, which SGLang fuses with it"
                    raise BrokenWeights(reason, file=ADAPTER_WEIGHTS)
