"""Loads a model from its Hugging Face directory, and copies the small files beside its weights."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainer_service.model.attention.packed_attention import set_attention
from trainer_service.model.head.logprob_head import set_head
from trainer_service.model.images import reads_images
from trainer_service.model.routers import recompute_contexts
from trainer_service.model.sharding.partitioned import load_partitioned

WEIGHTS = "model.safetensors"
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
"""The allowed names of published files: rollout servers and the trainer's HTTP server accept no others."""
NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".pickle", ".pkl", ".py", ".so")
"""File name endings of weights and of code. Published versions have weights of their own, and rollout servers
refuse code."""
CHECKPOINTING = {"use_reentrant": False, "context_fn": recompute_contexts}
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def load_model(
    path: Path, dtype: torch.dtype, flash: bool = False, zero_config: Mapping[str, object] | None = None
) -> Any:
    """Load the base model. Its attention keeps packed rows apart, and its head computes log-probabilities of
    sampled tokens. It has no dropout, which would make them differ from the engine's. With a
    configuration of ZeRO 3, this rank gets a part of each weight."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    # cuDNN would round the factors of convolutions in float32 to the 10 bits of TF32. Products have all bits.
    torch.backends.cudnn.allow_tf32 = False
    sees = reads_images(path)
    if zero_config is None:
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = kind.from_pretrained(path, dtype=dtype)
    else:
        model = load_partitioned(path, dtype, zero_config)
    set_attention(model, flash=flash and dtype is torch.bfloat16 and not sees)
    if sees:  # the patches of an image attend to each other
        model.set_attn_implementation({"vision_config": "sdpa"})
    set_head(model)
    _disable_dropout(model)
    return model


def copy_small_files(source: Path, target: Path) -> None:
    """Copy the files that a server needs besides the weights: configuration, tokenizer and chat template."""
    for path in sorted(source.iterdir()):
        if path.is_file() and FILE_NAME.fullmatch(path.name) and not path.name.endswith(NOT_COPIED):
            shutil.copyfile(path, target / path.name)


def tensor_dtypes(directory: Path) -> dict[str, torch.dtype]:
    """The dtype of every tensor in a directory's safetensors files, by name. Raises SystemExit without such
    files, and for quantized weights: they cannot be trained."""
    dtypes: dict[str, torch.dtype] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                stored = file.get_slice(name).get_dtype()
                if stored not in SAFETENSORS_DTYPES:
                    raise SystemExit(
                        f"trainer.model_path: {path} has {name} in {stored}, and quantized weights cannot be "
                        f"trained: give a copy of the model with {', '.join(SAFETENSORS_DTYPES)} tensors only"
                    )
                dtypes[name] = getattr(torch, SAFETENSORS_DTYPES[stored])
    if not dtypes:
        raise SystemExit(f"trainer.model_path: {directory} holds no safetensors weights")
    return dtypes


def enable_activation_checkpointing(model: Any) -> None:
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=CHECKPOINTING)


def _disable_dropout(model: Any) -> None:
    """Set all dropout rates of the model to 0.

    eval() would also disable dropout, but transformers uses activation checkpointing only in train() mode.
    """
    for module in [*model.modules(), getattr(model, "config", None)]:
        for name, value in vars(module).items() if module is not None else ():
            if _is_rate(type(module).__name__, name) and isinstance(value, float):
                setattr(module, name, 0.0)


def _is_rate(kind: str, name: str) -> bool:
    """Whether an attribute is a dropout rate. Torch's layers call it `p`; models have names like
    attention_dropout, resid_pdrop and layerdrop."""
    return name == "p" if "Dropout" in kind else "drop" in name
