"""A tiny random Qwen3-VL with its own tokenizer and processor: a Hugging Face directory that SGLang serves.

python -m tests.support.tiny_vision_model DIRECTORY [SEED]   makes one by hand
"""

import json
import sys
from pathlib import Path

from tests.support.tiny_model import SPECIAL_TOKENS, write_tokenizer
from weir.demo.student import CHAT_TEMPLATE

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE = 16, 2
FACTOR = PATCH * MERGE
"""The pixels of the side of a square that becomes one token."""
LEAST_PIXELS, MOST_PIXELS = 2 * FACTOR**2, 64 * FACTOR**2
PARTS = (
    "{%- macro shown(content) %}"
    "{%- if content is string %}{{- content }}{%- else %}"
    "{%- for part in content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{%- endmacro %}"
)
TEMPLATE = PARTS + CHAT_TEMPLATE.replace("+ message.content +", "+ shown(message.content) +")
"""Qwen3-VL's form."""


def make_tiny_vision_model(directory: Path, *, seed: int = 0, head_scale: float = 1.0) -> Path:
    """Write config, weights (F32, seeded), tokenizer and the processor's settings; return the directory."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    size, ids = write_tokenizer(directory, (*SPECIAL_TOKENS, *VISION_TOKENS), TEMPLATE)
    text = {
        "vocab_size": size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.1,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        eos_token_id=ids["<|im_end|>"],
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(head_scale)
    model.save_pretrained(directory)
    _write_processor(directory)
    return directory


def _write_processor(directory: Path) -> None:
    common = {
        "size": {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    image = {**common, "image_processor_type": "Qwen2VLImageProcessorFast"}
    video = {**common, "video_processor_type": "Qwen3VLVideoProcessor"}
    for name, settings in (("preprocessor_config", image), ("video_preprocessor_config", video)):
        (directory / f"{name}.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


if __name__ == "__main__":
    make_tiny_vision_model(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
