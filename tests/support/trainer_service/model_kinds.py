"""Tiny models of all kinds of transformers' causal language models, each tried once in the trainer.

    python -m tests.support.trainer_service.model_kinds        prints the table of results/model_kinds.md

configuration ─▶ random model ─▶ the trainer's check ─┬─ refused, in a sentence
                                                      └─ a micro-batch: values and gradients of plain torch?
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.trainer_service.random_rows import row_of
from tests.support.trainer_service.related_rows import related_rows
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import CheckedModel, ModelUnfit, load_model
from trainer_service.model.packed_attention import Packing
from trainer_service.model.self_check import check_model
from trainer_service.rows.rows import Row, micro_batches

CPU = torch.device("cpu")
MIXES = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
STATES = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "state_size": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
WIDTH, FEED, LAYERS, HEADS, POSITIONS = 32, 48, 2, 4, 128
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "rotary_dim": 4,
    "embedding_size": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "word_embed_proj_dim"], WIDTH),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"], FEED),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], LAYERS),
    **dict.fromkeys(["decoder_layers", "encoder_layers"], LAYERS),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "attention_heads"], HEADS),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], HEADS),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], POSITIONS),
    **MIXES,
    **LATENT,
    **STATES,
}
"""Each configuration takes the names that it knows."""
AS_MANY_KEYS = {"num_key_value_heads": HEADS}
ROPE_HEADS = {"num_key_value_heads": HEADS, "head_dim": 4}
WITHOUT = object()
"""In place of a value: the configuration does not take this name."""
OWN: dict[str, dict[str, Any]] = {
    "axk1": AS_MANY_KEYS | {"head_dim": WITHOUT},
    "axk2": AS_MANY_KEYS | {"head_dim": WITHOUT},
    "deepseek_v2": AS_MANY_KEYS,
    "deepseek_v3": ROPE_HEADS,
    "deepseek_v32": AS_MANY_KEYS | {"head_dim": WITHOUT},
    "dots3_note_text": AS_MANY_KEYS,
    "falcon": {"head_dim": WITHOUT},
    "gemma4_text": {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "glm4_moe_lite": AS_MANY_KEYS,
    "glm_moe_dsa": AS_MANY_KEYS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "inkling_text": {"unpadded_vocab_size": 80},
    "inkling2_text": {"unpadded_vocab_size": 80},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": ROPE_HEADS,
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "minicpm3": AS_MANY_KEYS,
    "roc_bert": {"pronunciation_vocab_size": 30, "shape_vocab_size": 30},
    "xlstm": {"v_head_dim": WITHOUT},
    "youtu": ROPE_HEADS,
    "zaya": {"num_experts_per_tok": 1},
}
DYNAMIC = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
LONG_ROPE: dict[str, Any] = {
    "rope_theta": 1e4,
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert (causal)": ("bert", {"is_decoder": True}),
    "falcon (alibi)": ("falcon", {"alibi": True}),
    "falcon (new)": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "llama (dynamic)": ("llama", {"rope_parameters": DYNAMIC}),
    "phi3 (longrope)": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64}),
    "phimoe (window)": ("phimoe", {"sliding_window": 16}),
    "qwen2 (windows)": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
}
"""Kinds with settings that change how tokens mix, by name."""
LEFT_OUT = {
    *(
        "blt",
        "emu3",
        "fuyu",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "git",
        "got_ocr2",
        "llama4",
        "mllama",
    ),
    *("moss_transcribe_diarize", "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "dots3_note"),
    *(
        "cohere_compass_text",
        "dbrx",
        "falcon_h1",
        "gemma3n_text",
        "gemma4_assistant",
        "gemma4_unified_assistant",
    ),
    *("musicgen", "musicgen_melody", "prophetnet", "reformer", "xlnet", "zamba", "zamba2"),
}
"""Kinds with several towers, or whose configuration these sizes do not make small."""


def kinds() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - LEFT_OUT | {*VARIANTS})


def make_kind(name: str, directory: Path) -> Any:
    """A random model of this kind, as transformers loads it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, variant = VARIANTS.get(name, (name, {}))
    options = SIZES | OWN.get(kind, {}) | variant
    config = CONFIG_MAPPING[kind](**{key: value for key, value in options.items() if value is not WITHOUT})
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.25)
    model.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Tried:
    """What became of a kind."""

    name: str
    checked: CheckedModel | None
    """None: refused."""
    sentence: str
    difference: float = 0.0
    """From plain torch with each row alone, as a part of the largest log-probability, entropy or gradient."""

    @property
    def outcome(self) -> str:
        if self.checked is None:
            return "refused"
        return "one row a pass" if self.checked.packing is Packing.ONE_ROW else "packed"

    @property
    def from_all_logits(self) -> bool:
        return self.checked is not None and self.checked.needs_all_logits


def try_kind(name: str, directory: Path) -> Tried:
    """Check a model of this kind, and compare one micro-batch with plain torch."""
    plain = make_kind(name, directory)
    model = load_model(directory, torch.float32)
    try:
        checked = check_model(model, CPU)
    except ModelUnfit as error:
        return Tried(name, None, error.check.detail)
    said = "; ".join(each.detail for each in checked.checks if each.outcome != "right")
    return Tried(name, checked, said, _difference(plain, model, checked.packing))


def _difference(plain: Any, model: Any, packing: Packing) -> float:
    rows = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17, 2])]
    rows += related_rows(roots=1, branches=1, tips=2)
    (batch,) = micro_batches(rows, 1000, share_prefixes=packing is Packing.SEGMENTS)
    lp_T, entropy_T, _ = scores(model, batch, packing, CPU)
    expected_T2 = torch.cat([alone(plain, rows[row]) for row in dict.fromkeys(batch.rows_T.tolist())])
    found_T2 = torch.stack([lp_T, entropy_T], 1).detach()
    size = max(1.0, float(expected_T2.detach().abs().max()))
    of_values = float((found_T2 - expected_T2.detach()).abs().max()) / size
    (-lp_T.mean()).backward()  # type: ignore[no-untyped-call]
    (-expected_T2[:, 0].mean()).backward()  # type: ignore[no-untyped-call]
    return max(of_values, _of_gradients(dict(model.named_parameters()), dict(plain.named_parameters())))


def _of_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    pairs = [(found[name].grad, expected[name].grad) for name in found]
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    assert both
    largest = max(float(other.abs().max()) for _, other in both)
    return max(float((one - other).abs().max()) for one, other in both) / largest


def alone(plain: Any, row: Row) -> Tensor:
    """log p and entropy [T, 2] of a row's trained tokens, by transformers and log_softmax."""
    at = np.flatnonzero(row.mask_L)
    logits_TV = plain(torch.from_numpy(row.ids_L)[None], use_cache=False).logits[0, at - 1]
    lp_TV = (logits_TV / torch.from_numpy(row.temperatures_L[at])[:, None]).log_softmax(-1)
    lp_T = lp_TV[torch.arange(len(at)), torch.from_numpy(row.ids_L[at])]
    return torch.stack([lp_T, torch.special.entr(lp_TV.detach().exp()).sum(-1)], 1)


def table(tried: Sequence[Tried]) -> Iterator[str]:
    """The lines of the table in the documents."""
    yield "| in the trainer | kinds of transformers |"
    yield "|---|---|"
    by_outcome = sorted(tried, key=lambda each: (each.outcome != "packed", each.outcome, each.name))
    for outcome, group in groupby(by_outcome, lambda each: each.outcome):
        names = [each.name + ("*" if each.from_all_logits else "") for each in group]
        yield f"| {outcome}: {len(names)} | {', '.join(names)} |"


def main() -> None:
    torch.set_num_threads(1)
    tried = []
    for name in kinds():
        with tempfile.TemporaryDirectory() as directory:
            tried.append(try_kind(name, Path(directory)))
        print(
            f"{name}: {tried[-1].outcome}, {tried[-1].difference:.1g} off. {tried[-1].sentence}", flush=True
        )
    print(*table(tried), sep="\n")


if __name__ == "__main__":
    main()
