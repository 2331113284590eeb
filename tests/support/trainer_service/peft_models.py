"""An adapter as PEFT itself reads and applies it."""

import warnings
from pathlib import Path
from typing import Any

import torch


def peft_model(base: Path, adapter: Path, *, trainable: bool = False) -> Any:
    """The base model of transformers in float32 with this adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        # An adapter of the head concerns logits only, and PEFT warns of a merge that would concern both.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        return PeftModel.from_pretrained(model, adapter, is_trainable=trainable).eval()
