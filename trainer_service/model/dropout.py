"""Switches off dropout, which would make the trainer's log-probabilities differ from the engine's."""

from typing import Any


def disable_dropout(model: Any) -> None:
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
