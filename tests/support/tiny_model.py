"""A tiny random Qwen3 with its own tokenizer: a full Hugging Face directory that SGLang serves as is.

python -m tests.support.tiny_model DIRECTORY [SEED]   makes one by hand
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weir.demo.student import THINKING_TEMPLATE

VOCABULARY = 1024
PEAKED = 20.0
"""A scale of the output head that makes some tokens much likelier than others; an adapter decides which."""
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    tied: bool = False,
    head_scale: float = 1.0,
    attention_scale: float = 1.0,
) -> Path:
    """Write config, weights (F32, seeded) and tokenizer into `directory`; return the directory.

    `head_scale` multiplies the output head. At 1, all tokens are about equally likely, whatever an adapter
    does to the layers before the head: a loop can learn only with a larger one. `attention_scale` multiplies
    what attention adds. At 1, the next token hardly depends on the prompt; at 8, a loop can learn another
    answer for each prompt.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        intermediate_size=128, num_hidden_layers=2, tie_word_embeddings=tied, **_shared_config(directory)
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(head_scale)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(attention_scale)
    model.save_pretrained(directory)
    return directory


def make_tiny_experts(directory: Path, *, seed: int = 0) -> Path:
    """The same for a mixture of experts, with weights large enough that experts matter."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=3,
        initializer_range=0.12,
        tie_word_embeddings=False,
        **_shared_config(directory),
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory


def _shared_config(directory: Path) -> dict[str, Any]:
    """Write the tokenizer. Returns what the models have in common."""
    size, ids = write_tokenizer(directory)
    return {
        "vocab_size": size,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }


def write_tokenizer(
    directory: Path, special: Sequence[str] = SPECIAL_TOKENS, template: str = THINKING_TEMPLATE
) -> tuple[int, dict[str, int]]:
    """Write a tokenizer of VOCABULARY ids, the last of which are the special tokens. Returns the number of
    ids, and those of the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _text(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # The special tokens have the ids after the ordinary ones, as in the real Qwen3.
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in special}
    return tokenizer.get_vocab_size(), ids


def _text() -> Iterator[str]:
    """Prose and code of Python's own library: the same on every machine with the same Python."""
    for module in ("argparse", "ast", "asyncio", "email", "json", "logging", "textwrap", "typing"):
        path = Path(json.__file__).parent.parent / f"{module}.py"
        if path.exists():
            yield from path.read_text(encoding="utf-8").splitlines(keepends=True)


if __name__ == "__main__":
    make_tiny_model(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
