"""Checks a model against itself, on a small part of it: the head's log-probabilities against the model's own
logits, and rows packed against rows alone.

rows alone ─▶ the model's own values ─┬─ the head's for rows alone: equal? ─ no ─▶ from all logits
                                      └─ those of packed rows: equal? ────── no ─▶ one row a pass
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollout_queue.protocol.model_checks import ModelCheck
from trainer_service.model.attention.packed_attention import (
    Packing,
    use_attention,
    use_own_attention,
    ways_to_pack,
)
from trainer_service.model.head.logprob_head import LogprobHead
from trainer_service.model.self_check.outcome import CheckedModel, ModelUnfit, first_words
from trainer_service.model.self_check.probe import ModelProbe, probe_of
from trainer_service.model.self_check.small_part import small_part

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
