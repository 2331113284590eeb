"""Attention of packed rows: each row sees itself alone, and nobody builds a mask of the whole pack.

    queries, keys, values of a pack ─ cut between rows ─▶ causal attention of each ─▶ joined again

Transformers calls it by its registered name; where the rows lie travels with the forward pass, as keyword
arguments that a model hands to its attention.
"""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

logger = logging.getLogger(__name__)

PACKED = "weir_packed"
"""Our name in transformers' `AttentionInterface`."""
FLASH = "flash_attention_2"
CUT_BY_US = {"full_attention", "sliding_attention"}
"""Layers (a configuration's `layer_types`) whose attention needs no more than the bounds of its rows."""


class Packing(Enum):
    """How a model keeps the rows of a pack apart."""

    SEGMENTS = "its attention is ours"
    FLASH = "flash attention is told the bounds"
    POSITIONS = "transformers builds a mask from positions that start again"
    ALONE = "not at all: one row a pass"


@dataclass
class Segments:
    """The rows of one pack, on their way to the attention."""

    lengths: Sequence[int]
    heard: bool = False
    """Whether it arrived; a model that loses it on the way would let rows see each other."""


def packing_of(model: Any) -> Packing:
    """As the model is set up at present."""
    if not _is_attention_alone(model):
        return Packing.ALONE
    chosen = model.config._attn_implementation
    if chosen in (PACKED, FLASH):
        return Packing.SEGMENTS if chosen == PACKED else Packing.FLASH
    return Packing.POSITIONS if "position_ids" in _parameters(model) else Packing.ALONE


def set_attention(model: Any, flash: bool = False) -> None:
    """Have the model attend row by row, where it lets its attention be replaced. `flash`: by flash attention,
    if that is installed and the model knows it."""
    from transformers import AttentionInterface
    from transformers.utils import is_flash_attn_2_available

    AttentionInterface.register(PACKED, packed_attention)
    # Only a model that flash attention can serve tells its attention of sliding windows.
    if _is_attention_alone(model) and model._supports_attention_backend and model._supports_flash_attn:
        if flash and not is_flash_attn_2_available():
            logger.info("flash-attn is not installed; rows attend one by one, by torch's attention")
        model.set_attn_implementation(FLASH if flash and is_flash_attn_2_available() else PACKED)
    packing = packing_of(model)
    if packing in (Packing.POSITIONS, Packing.ALONE):
        logger.info("%s keeps packed rows apart otherwise: %s", type(model).__name__, packing.value)


def told(packing: Packing, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What a forward pass over rows of these lengths is given for its attention."""
    if packing is Packing.SEGMENTS:
        return {"segments": Segments(lengths)}
    if packing is not Packing.FLASH:
        return {}
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[B, heads, N, D] to [B, N, heads, D], for transformers. Without `segments` a pack is one row.

    Raises ValueError at what it cannot do: attention that is not causal, a mask, a cache, biased positions.
    """
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    unequal = query.shape[2] != key.shape[2]
    if not causal or unequal or attention_mask is not None or others.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} asks for attention that packed rows cannot have")
    if segments is not None:
        segments.heard = True
    lengths = [query.shape[2]] if segments is None else segments.lengths
    runs = [(length, len(list(equal))) for length, equal in groupby(lengths)]
    parts = [length * count for length, count in runs]
    attended = []
    for (length, count), *qkv in zip(
        runs, *(torch.split(each, parts, 2) for each in (query, key, value)), strict=True
    ):
        q, k, v = (_stacked(each, count) for each in qkv)
        if softcap is None and s_aux is None:
            out = _attend(q, k, v, scaling, sliding_window)
        else:
            out = _attend_in_full(q, k, v, scaling, sliding_window, softcap, s_aux)
        attended.append(out.transpose(1, 2).reshape(query.shape[0], count * length, query.shape[1], -1))
    return torch.cat(attended, dim=1), None


def _stacked(packed: Tensor, count: int) -> Tensor:
    """[B, heads, count · L, D] to [B · count, heads, L, D]: rows of one length are attended to together."""
    if count == 1:
        return packed
    batch, heads, tokens, width = packed.shape
    return packed.view(batch, heads, count, tokens // count, width).transpose(1, 2).flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = q.shape[2]
    seen_LL = _seen(length, window, q.device) if window is not None and length > window else None
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen_LL,
        is_causal=seen_LL is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _attend_in_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """With scores that are capped (Gemma 2) or a sink that takes part of the attention (GPT-OSS): torch has
    no kernel for either, so the scores of a row exist."""
    heads, length = q.shape[1], q.shape[2]
    k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_seen(length, window, q.device), -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, heads, 1, 1).expand(q.shape[0], heads, length, 1)
        scores = torch.cat([scores, sinks], dim=3)
    return scores.softmax(3)[..., :length].to(v.dtype) @ v


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L], True where a token (row) sees another (column): itself and the window-1 before it."""
    seen_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen_LL if window is None else seen_LL.triu(1 - window)


def _is_attention_alone(model: Any) -> bool:
    """Whether no layer carries anything from token to token but attention that we know how to cut. State
    spaces, linear attention, convolutions and attention in fixed chunks do."""
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    folds = any(isinstance(each, torch.nn.Conv1d) for each in model.modules())
    return types <= CUT_BY_US and not model._is_stateful and not folds


def _parameters(model: Any) -> set[str]:
    return set(inspect.signature(type(model).forward).parameters)
