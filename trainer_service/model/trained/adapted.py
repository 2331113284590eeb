"""One set of adapters as a module of its own, so that DeepSpeed sees its weights and no others.

DeepSpeed's engine ─▶ AdaptedModel ─ activates its adapters ─▶ the base model, which other sets share
"""

from typing import Any

import torch

from trainer_service.model.head.logprob_head import LogprobHead
from trainer_service.model.lora import Adapters

ATTENTION = ("attn", "attention", "mixer", "mamba")
"""Parts of the names of modules that mix tokens."""
HEAD = "lm_head"
"""The name of the only output head for which engines take adapters."""


class AdaptedModel(torch.nn.Module):
    """The base model with one set of adapters. Its parameters are those of the adapters only, under names
    that do not contain the name of the set. So the files of a checkpoint fit another set of equal shape."""

    def __init__(self, base: Any, adapters: Adapters) -> None:
        super().__init__()
        self._base, self._adapters = (base,), adapters  # in a tuple, the base is no submodule
        for name, parameter in adapters.parameters().items():
            self.register_parameter(name.replace(".", "-"), parameter)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self._adapters.activate()
        return self._base[0](*arguments, **named)


class LayerNames:
    """The names of a model's linear layers, as PEFT selects layers by them. It must be made before the model
    has adapters."""

    def __init__(self, model: Any) -> None:
        linear = [name for name, each in model.named_modules() if type(each) is torch.nn.Linear]
        self._attention = {name for name in linear if _mixes_tokens(name)}
        self._mlp = set(linear) - self._attention
        self.adapts_head = isinstance(getattr(model, HEAD, None), LogprobHead)
        """Whether the output head can have an adapter."""

    def chosen(self, *, attention: bool, mlp: bool, head: bool) -> list[str]:
        """The last parts of the names of the chosen layers. Where other layers have the same last part, it is
        preceded by the name of its module."""
        wanted = (self._attention if attention else set()) | (self._mlp if mlp else set())
        others = {name.rpartition(".")[2] for name in (self._attention | self._mlp) - wanted}
        return sorted({_short(name, others) for name in wanted} | ({HEAD} if head else set()))


def _mixes_tokens(name: str) -> bool:
    return any(part in name.rpartition(".")[0].lower() for part in ATTENTION)


def _short(name: str, others: set[str]) -> str:
    parts = name.split(".")
    return parts[-1] if parts[-1] not in others else ".".join(parts[-2:])
