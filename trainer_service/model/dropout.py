"""A model without dropout, which would make the trainer's logprobs another policy's than the engine's."""

from typing import Any


def without_dropout(model: Any) -> None:
    """Whatever the model's configuration says. eval() would do as much, but not with activation
    checkpointing, which transformers leaves out unless a model is in train()."""
    for module in [*model.modules(), getattr(model, "config", None)]:
        for name, value in vars(module).items() if module is not None else ():
            if _is_rate(type(module).__name__, name) and isinstance(value, float):
                setattr(module, name, 0.0)


def _is_rate(kind: str, name: str) -> bool:
    """`p` of torch's own layers; elsewhere attention_dropout, resid_pdrop, layerdrop and the like."""
    return name == "p" if "Dropout" in kind else "drop" in name
