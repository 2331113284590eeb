"""Small random models of several architectures, each with the way in which the trainer packs its rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_service.model.packed_attention import Packing

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
CAPS = {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.2}
EXPERTS = {"num_local_experts": 1, "num_experts_per_tok": 1}
"""One expert, because the last bits of a result depend on how many tokens an expert multiplies at once."""


@dataclass(frozen=True)
class Family:
    name: str
    options: dict[str, Any]
    packing: Packing = Packing.SEGMENTS


FAMILIES = [
    Family("Qwen3", {}),
    Family("Qwen3", LAYERS | {"use_sliding_window": True, "tie_word_embeddings": True}),
    Family("Llama", {}),
    Family("Mistral", {"sliding_window": 6}),
    Family("Gemma2", LAYERS | CAPS),
    Family("Gemma3Text", LAYERS),
    Family("GptOss", LAYERS | EXPERTS),
    Family("Cohere", {"logit_scale": 3.0}),
    Family("Granite", {"logits_scaling": 0.25}),
    Family("Lfm2", {"layer_types": ["conv", "full_attention"]}, Packing.ONE_ROW),
    Family("Bloom", {"n_head": 4, "n_layer": 2}, Packing.ONE_ROW),
]


def made(family: Family, directory: Path) -> Any:
    """A random model of the family, loaded by transformers."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{family.name}Config")(**SMALL | family.options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    model.save_pretrained(directory)
    return model.eval()
