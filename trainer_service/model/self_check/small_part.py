"""Cuts a model down to a small part for a few passes: its first layers, with short windows.

model ─ its first layers, one of each kind at least ─ windows of 16 tokens ─▶ passes ─▶ the model as it was
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer_service.model.sharding.randomness import random_states, restore_random_states
from trainer_service.model.sharding.zero import gathered

FEWEST_LAYERS, MOST_LAYERS = 2, 8
WINDOW = 16
"""The longest window of the small part, so that short rows are longer than it."""


@contextmanager
def small_part(model: Any, whole: bool = False) -> Iterator[list[Any]]:
    """Inside, passes of the model go through its first layers only, which the context gives; with `whole`,
    through all of them. Every rank must enter it. It changes neither weights nor random generators."""
    states, trains = random_states(), model.training
    with ExitStack() as undo:
        undo.callback(restore_random_states, states)
        undo.callback(model.train, trains)
        model.eval()
        layers = _shorten_layers(model, undo, MOST_LAYERS if not whole else None)
        _shorten_windows(model, undo)
        _gather_when_used(model, undo)
        undo.enter_context(torch.no_grad())
        yield layers


def _gather_when_used(model: Any, undo: ExitStack) -> None:
    """At stage 3 of ZeRO, let each module have its weights while it is called, and no longer."""
    for module in model.modules():
        partitioned = [each for each in module.parameters(recurse=False) if hasattr(each, "ds_id")]
        if partitioned:
            _gather_in_calls(module, partitioned, undo)


def _gather_in_calls(module: Any, weights: Sequence[Tensor], undo: ExitStack) -> None:
    calls: list[AbstractContextManager[None]] = []

    def before(*_: Any) -> None:
        calls.append(gathered(weights))
        calls[-1].__enter__()

    def after(*_: Any) -> None:
        calls.pop().__exit__(None, None, None)

    undo.callback(module.register_forward_pre_hook(before).remove)
    undo.callback(module.register_forward_hook(after, always_call=True).remove)


def _shorten_layers(model: Any, undo: ExitStack, most: int | None) -> list[Any]:
    """Cut each list of the decoder's layers. Returns the layers that are left."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    left: list[Any] = []
    for owner in list(model.modules()):
        for name, layers in list(owner.named_children()):
            if not isinstance(layers, torch.nn.ModuleList) or len(layers) != count:
                continue
            kept = layers if most is None else layers[: _enough(model, layers, most)]
            left += kept
            if len(kept) < len(layers):
                undo.callback(setattr, owner, name, layers)
                setattr(owner, name, kept)
    return left


def _enough(model: Any, layers: Any, most: int) -> int:
    """How many layers from the first on have one of each kind."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    kinds = [(kind, _kind(layer)) for kind, layer in zip(types, layers, strict=False)]
    first = [kinds.index(kind) for kind in set(kinds)]
    return min(max(FEWEST_LAYERS, 1 + max(first, default=0)), most)


def _kind(layer: Any) -> tuple[Any, ...]:
    """What makes a layer another kind than its neighbours: its modules, and their switches and windows."""
    return tuple(
        (
            name,
            type(each).__name__,
            *sorted((key, value) for key, value in vars(each).items() if _tells(key, value)),
        )
        for name, each in layer.named_modules()
    )


def _tells(name: str, value: object) -> bool:
    switch = isinstance(value, bool | str) and name != "training"
    return not name.startswith("_") and (switch or _is_window(name, value))


def _is_window(name: str, value: object) -> bool:
    return "window" in name and isinstance(value, int) and not isinstance(value, bool)


def _shorten_windows(model: Any, undo: ExitStack) -> None:
    """Shorten each attention window, in the configurations and in the modules that have copied it."""
    modules = list(model.modules())
    configs = {id(each): each for each in _configs(model.config)}
    for module in modules:
        if (config := vars(module).get("config")) is not None:
            configs[id(config)] = config
    for owner in [*configs.values(), *modules]:
        for name, value in list(vars(owner).items()):
            if _is_window(name, value) and value > WINDOW:
                undo.callback(setattr, owner, name, value)
                setattr(owner, name, WINDOW)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None and not isinstance(inner, Mapping):
            yield from _configs(inner)
