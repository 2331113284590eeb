"""Small random mixtures of experts, of several architectures."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
GROUPS = {"n_group": 1, "topk_group": 1, "v_head_dim": 8, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"moe_intermediate_size": 8, "num_experts": 4},
    "Mixtral": {"num_local_experts": 4},
    "DeepseekV3": {"moe_intermediate_size": 8, "n_routed_experts": 4, **GROUPS, **LATENT},
    "Glm4Moe": {"moe_intermediate_size": 8, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "GptOss": {"num_local_experts": 4},
}


def made_experts(family: str, directory: Path) -> dict[str, Tensor]:
    """Save a random model of the family. Returns the tensors of its file."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SMALL | FAMILIES[family])
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return dict(load_file(directory / "model.safetensors"))
