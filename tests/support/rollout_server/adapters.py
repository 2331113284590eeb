"""Small LoRA adapters for tests, and a rollout server that takes them."""

import json
from pathlib import Path
from typing import Any

from tests.support.rollout_server.harness import Harness, make_harness
from tests.support.rollout_server.weights import float32_tensors, publish, write_model, write_safetensors

LAYER = "model.layers.0.self_attn."
MODEL_SHAPES = {
    "model.embed_tokens.weight": [4, 2],
    f"{LAYER}q_proj.weight": [6, 2],
    f"{LAYER}v_proj.weight": [3, 2],
    f"{LAYER}o_proj.weight": [2, 6],
    "lm_head.weight": [4, 2],
}
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
}
LORA = {"max_rank": 8}


def factors(rank: int, *modules: str) -> dict[str, list[int]]:
    """The shapes of an adapter's tensors."""
    shapes = {}
    for module in modules:
        rows, columns = MODEL_SHAPES[f"{LAYER}{module}.weight"]
        shapes[f"base_model.model.{LAYER}{module}.lora_A.weight"] = [rank, columns]
        shapes[f"base_model.model.{LAYER}{module}.lora_B.weight"] = [rows, rank]
    return shapes


def adapter(
    harness: Harness,
    version: int,
    shapes: dict[str, list[int]] | None = None,
    fill: float = 1.0,
    **config: Any,
) -> Path:
    """Publish an adapter."""
    directory = harness.directory / "policies" / f"v{version}"
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    tensors = float32_tensors(fill * version, shapes or factors(4, "q_proj", "v_proj"))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    publish(directory, version)
    return directory


def with_layers(directory: Path, tied: bool = False, **settings: Any) -> Harness:
    """A server whose model has the layers of the adapters; if `tied`, the embedding is its head."""
    shapes = {name: each for name, each in MODEL_SHAPES.items() if not tied or name != "lm_head.weight"}
    write_model(directory / "model", float32_tensors(shapes=shapes), tie_word_embeddings=tied)
    return make_harness(directory, **settings)


def whole_weights(harness: Harness, version: int) -> Path:
    """Publish whole weights for the same model."""
    directory = harness.directory / "policies" / f"v{version}"
    write_model(directory, float32_tensors(float(version), MODEL_SHAPES))
    publish(directory, version)
    return directory


def names(status: dict[str, Any]) -> list[tuple[int, str]]:
    """The versions of the adapters that `/status` lists, and their names in the engine."""
    return [(each["version"], each["name"]) for each in status["adapters"] if each["name"]]
