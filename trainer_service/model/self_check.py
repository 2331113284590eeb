"""Checks a model against itself, on a small part of it: the head's log-probabilities against the model's own
logits, and rows packed against rows alone.

rows alone ─▶ the model's own values ─┬─ the head's for rows alone: equal? ─ no ─▶ from all logits
                                      └─ those of packed rows: equal? ────── no ─▶ one row a pass
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout_queue.protocol.message import ModelCheck
from trainer_service.model.huggingface import CheckedModel, ModelUnfit, first_words
from trainer_service.model.logprob_head import LogprobHead
from trainer_service.model.model_probe import ModelProbe, probe_of
from trainer_service.model.packed_attention import (
    Packing,
    check_can_share,
    use_attention,
    use_own_attention,
    ways_to_pack,
)
from trainer_service.model.parallel import Parallel, random_states, restore_random_states
from trainer_service.model.settings import ModelSettings
from trainer_service.model.zero import gathered, uses_cuda

logger = logging.getLogger(__name__)

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


Agree = Callable[[bool], bool]
"""Whether something is true on all ranks."""
Ways = Sequence[tuple[str, Packing]]


def check_model(model: Any, device: torch.device, agree: Agree = bool, shares: bool = True) -> CheckedModel:
    """Check a model that `load_model` has made, on its device, and let it be computed in a way that is right.
    `shares` says whether rows may share prefixes. Every rank must call it; all get the same result.

    Raises ModelUnfit if no way gives the model's own values.
    """
    ways = ways_to_pack(model)
    use_own_attention(model)
    why = ""
    for whole in (False, True):  # some models make no pass through their first layers only
        with small_part(model, whole) as layers:
            try:
                probe = probe_of(model, layers, device)
            except Exception as error:  # whatever the model's code raises
                why = first_words(error)
                continue
            return _checked(probe, ways, agree, shares)
    raise _unfit("model", model, f"its own pass over one row fails ({why})")


def _checked(probe: ModelProbe, ways: Ways, agree: Agree, shares: bool) -> CheckedModel:
    if not agree(probe.without_later_tokens().within(probe.allowed)):
        raise _unfit("order", probe.model, "its tokens read later ones")
    columns, all_logits, of_head = _check_head(probe, agree)
    packing, of_packing = _check_packing(probe, ways, agree, shares)
    return CheckedModel(packing, columns, all_logits, (of_packing, of_head))


def _check_head(probe: ModelProbe, agree: Agree) -> tuple[int | None, bool, ModelCheck]:
    """How many logits the model keeps, and whether log-probabilities are computed from all of them."""
    head, columns = probe.model.get_output_embeddings(), None
    if not isinstance(head, LogprobHead):
        return None, True, _of_all_logits(probe, agree, "has no plain linear head")
    if probe.columns < head.out_features:
        columns = probe.columns
        head.cut(columns)
    found = probe.alone()
    if agree(found.within(probe.allowed) and not head.returns_logits):
        kept = "" if columns is None else f", of the {columns} that the model keeps"
        said = f"log-probabilities are computed a few logits at a time{kept}: {found.words}"
        return columns, False, ModelCheck(check="head", outcome="right", detail=said)
    head.returns_logits = True
    return columns, True, _of_all_logits(probe, agree, f"changes its logits in an unknown way: {found.words}")


def _of_all_logits(probe: ModelProbe, agree: Agree, why: str) -> ModelCheck:
    found = probe.alone()
    if not agree(found.within(probe.allowed)):
        raise _unfit("head", probe.model, f"its log-probabilities cannot be reproduced: {found.words}")
    name = type(probe.model).__name__
    detail = f"{name} {why}; all of its logits are computed at once"
    return ModelCheck(check="head", outcome="differs", detail=detail)


def _check_packing(probe: ModelProbe, ways: Ways, agree: Agree, shares: bool) -> tuple[Packing, ModelCheck]:
    """How rows are packed. The model is left with the attention for it."""
    why = "more than its attention mixes tokens, or it takes no positions"
    for implementation, packing in ways:
        use_attention(probe.model, implementation)
        found = probe.packed(packing, shares and packing is Packing.SEGMENTS)
        if agree(found.within(probe.allowed)):
            said = f"several rows a pass: {packing.value}; {found.words}"
            return packing, ModelCheck(check="packing", outcome="right", detail=said)
        why = f"packed rows: {found.words}"
    use_own_attention(probe.model)
    detail = f"{type(probe.model).__name__} gets one row a pass: {why}"
    return Packing.ONE_ROW, ModelCheck(check="packing", outcome="differs", detail=detail)


def _unfit(check: str, model: Any, why: str) -> ModelUnfit:
    name = type(model).__name__
    return ModelUnfit(ModelCheck(check=check, outcome="refused", detail=f"{name} cannot be trained: {why}"))


def check_at_start(model: Any, settings: ModelSettings, parallel: Parallel) -> CheckedModel:
    """Check a model that `load_base` has made, on this rank's device. Every rank must call it; all take the
    same decision. Raises SystemExit for a model that cannot be trained with these settings."""
    device = torch.device("cuda", torch.cuda.current_device()) if uses_cuda() else torch.device("cpu")
    if settings.sharding_stage < 3:  # else each rank has its part of each weight there
        model.to(device)
    agree = partial(parallel.agree, device=device)
    checked = check_model(model, device, agree, settings.share_prefixes)
    for each in checked.checks if parallel.rank == 0 else ():
        logger.log(logging.INFO if each.outcome == "right" else logging.WARNING, "%s", each.line)
    check_can_share(model, checked.packing, settings.sequence_parallel)
    return checked
