"""Computes attention over packed rows. Each row attends only to itself, without a mask over the whole pack.

    queries, keys, values of a pack ─ split into segments ─▶ causal attention of each ─▶ joined again

A segment is a row, or a part of rows that continues another segment: then it also attends to that one, and to
all those before it.

Transformers calls `packed_attention` by its registered name. The forward pass gets the bounds of the rows as
keyword arguments, and the model passes them to its attention.
"""

import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, groupby
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer_service.model.parallel import SequenceRanks, check_heads
from trainer_service.rows.rows import MicroBatch

logger = logging.getLogger(__name__)

WIDEST_FLASH_HEAD = 256
"""The widest head that flash attention takes, the one of torch and the package flash-attn alike."""

BLOCK = 2048
"""The mask of the rest of a row has at most so many rows."""


def attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """[B, heads, L, D]: each token attends to itself and to all tokens before it; with a window, only to the
    last `window` tokens, itself included. Keys and values may have fewer heads than queries, and more tokens:
    the queries are those of the last tokens."""
    length = q.shape[2]
    if length < k.shape[2]:
        return _attend_after(q, k, v, scaling, window)
    if window is None or length <= window:
        return _fused(q, k, v, scale=scaling, is_causal=True)
    first = _fused(*(each[:, :, :window] for each in (q, k, v)), scale=scaling, is_causal=True)
    blocks, left = divmod(length - window, window)
    parts = [first]
    mask_WK = _window_mask(window, q.device)
    if blocks:
        end = window * (1 + blocks)
        q_blocks = _blocks(q[:, :, window:end], window, window)
        k_blocks, v_blocks = (_blocks(each[:, :, :end], 2 * window, window) for each in (k, v))
        out = _fused(q_blocks, k_blocks, v_blocks, scale=scaling, attn_mask=mask_WK)
        parts.append(_joined(out, blocks))
    if left:
        start = length - left
        k_left, v_left = (each[:, :, start - window :] for each in (k, v))
        mask = mask_WK[:left, : window + left]
        parts.append(_fused(q[:, :, start:], k_left, v_left, scale=scaling, attn_mask=mask))
    return torch.cat(parts, dim=2)


def _attend_after(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length, keys = q.shape[2], k.shape[2]
    parts = []
    for start in range(0, length, BLOCK):
        queries = q[:, :, start : start + BLOCK]
        count, end = queries.shape[2], keys - length + start + queries.shape[2]
        first = 0 if window is None else max(0, end - count - window + 1)
        mask = causal_mask(count, end - first, window, q.device)
        k_part, v_part = k[:, :, first:end], v[:, :, first:end]
        parts.append(_fused(queries, k_part, v_part, scale=scaling, attn_mask=mask))
    return torch.cat(parts, dim=2)


def causal_mask(length: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[length, keys] bool: True where the token of the row attends to that of the column, as in `attend`. The
    tokens of the rows are the last of the columns."""
    before = keys - length
    mask = torch.ones(length, keys, dtype=torch.bool, device=device).tril(before)
    return mask if window is None else mask.triu(before + 1 - window)


def _fused(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """Torch's attention, in a form that one of its fused kernels takes. On CUDA, flash attention takes fewer
    heads of keys, but no mask and no float32. The memory-efficient kernel takes both, but needs as many heads
    of keys. Whatever neither takes, torch gives to a kernel that keeps all scores."""
    fewer = q.shape[1] != k.shape[1]
    flash = q.dtype.itemsize == 2 and "attn_mask" not in more and q.shape[3] <= WIDEST_FLASH_HEAD
    if fewer and q.device.type != "cpu" and not flash:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        fewer = False
    return scaled_dot_product_attention(q, k, v, enable_gqa=fewer, **more)


def _window_mask(window: int, device: torch.device) -> Tensor:
    """[W, 2 W] bool: True where the query of a block attends to the key. The first W keys are those of the
    block before."""
    ones = torch.ones(window, 2 * window, dtype=torch.bool, device=device)
    return ones.triu(1) & ones.tril(window)


def _blocks(tokens: Tensor, size: int, step: int) -> Tensor:
    """[B, heads, N, D] to [B · blocks, heads, size, D]: a block begins every `step` tokens."""
    return tokens.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _joined(blocks: Tensor, count: int) -> Tensor:
    """[B · count, heads, W, D] to [B, heads, count · W, D]."""
    _, heads, window, width = blocks.shape
    return blocks.view(-1, count, heads, window, width).transpose(1, 2).flatten(2, 3)


PACKED = "weir_packed"
"""The name of `packed_attention` in transformers' `AttentionInterface`."""
FLASH = "flash_attention_2"
SPLITTABLE_LAYERS = {"full_attention", "sliding_attention"}
"""The layers, as a configuration's `layer_types` names them, whose attention can be split at row bounds."""


class Packing(Enum):
    """How a model keeps the rows of a pack apart."""

    SEGMENTS = "packed_attention splits at row bounds"
    FLASH = "flash attention gets the row bounds"
    POSITIONS = "transformers builds a mask from positions that start again"
    ONE_ROW = "each pass holds one row"


@dataclass
class Segments:
    """The segments of one pack, which a model passes to its attention."""

    lengths: Sequence[int]
    """In tokens."""
    parents: Sequence[int]
    """As `MicroBatch.parents_S`."""
    sequence: SequenceRanks | None = None
    """The ranks that have the other slices of the pack."""
    reached_attention: bool = False
    """Set by `packed_attention`. If it is False after a pass, the model did not pass this argument on, and
    rows attended to each other."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """The first segment of each run, and how many it has. A run is consecutive whole rows of equal
        length, or one segment that continues another."""
        kinds = [
            (length, number if parent >= 0 else -1)
            for number, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True))
        ]
        first = 0
        for _, run in groupby(kinds):
            count = len(list(run))
            yield first, count
            first += count

    def before(self, segment: int) -> list[int]:
        """The segments that this one continues, from the root on."""
        path = []
        while (segment := self.parents[segment]) >= 0:
            path.append(segment)
        return path[::-1]


def packing_of(model: Any) -> Packing:
    """How the model keeps packed rows apart with its present attention, if it does what it claims."""
    if not _only_attention_mixes_tokens(model):
        return Packing.ONE_ROW
    chosen = model.config._attn_implementation
    if chosen in (PACKED, FLASH):
        return Packing.SEGMENTS if chosen == PACKED else Packing.FLASH
    takes_positions = "position_ids" in _parameters(model) and not _keeps_masks(model)
    return Packing.POSITIONS if takes_positions else Packing.ONE_ROW


def ways_to_pack(model: Any) -> list[tuple[str, Packing]]:
    """The attention and the packing to try, the fastest first. None is left for a model of one row a pass."""
    packing, chosen = packing_of(model), model.config._attn_implementation
    if packing is Packing.FLASH:
        return [(FLASH, packing), (PACKED, Packing.SEGMENTS)]
    return [] if packing is Packing.ONE_ROW else [(chosen, packing)]


def set_attention(model: Any, flash: bool = False) -> None:
    """Make the model attend row by row, if its attention can be replaced. With `flash`, it uses flash
    attention if that is installed and the model supports it."""
    from transformers import AttentionInterface
    from transformers.utils import is_flash_attn_2_available

    AttentionInterface.register(PACKED, packed_attention)
    # On Hopper, torch prefers cuDNN's attention, which plans each new length of row: 0.1 s in either pass.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Only models with support for flash attention pass sliding windows to their attention.
    if (
        _only_attention_mixes_tokens(model)
        and model._supports_attention_backend
        and model._supports_flash_attn
    ):
        # A model that names the kernels that it supports, like GPT-OSS for its sinks, gets no other.
        flash = flash and FLASH in (getattr(model, "_compatible_flash_implementations", None) or [FLASH])
        if flash and not is_flash_attn_2_available():
            logger.info("flash-attn is not installed; using torch's attention, row by row")
        use_attention(model, FLASH if flash and is_flash_attn_2_available() else PACKED)


def use_attention(model: Any, implementation: str) -> None:
    """Let the layers of the decoder use this attention."""
    model.set_attn_implementation(implementation)
    if (
        getattr(model.config, "vision_config", None) is not None
    ):  # the patches of an image attend to each other
        model.set_attn_implementation({"vision_config": "sdpa"})


def use_own_attention(model: Any) -> None:
    """Let the model use the attention that it has without the trainer."""
    if model.config._attn_implementation in (PACKED, FLASH):
        use_attention(model, "sdpa" if model._supports_sdpa else "eager")


def check_can_share(model: Any, packing: Packing, ranks: int) -> None:
    """Raises SystemExit if so many ranks cannot compute a micro-batch of this model together."""
    if ranks == 1:
        return
    if packing is not Packing.SEGMENTS:
        raise SystemExit(
            f"trainer.sequence_parallel: {type(model).__name__} mixes tokens outside of attention"
        )
    check_heads(model.config.get_text_config(), ranks)


class AttentionArguments(TypedDict, total=False):
    """The keyword arguments that give the row bounds to a model's attention."""

    segments: Segments
    """For `packed_attention`."""
    cu_seq_lens_q: Tensor
    """The bounds of the rows, [S + 1] int32. Flash attention takes this and the next three arguments."""
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int


def attention_arguments(
    packing: Packing, batch: MicroBatch, device: torch.device, sequence: SequenceRanks | None = None
) -> AttentionArguments:
    """The arguments that a forward pass gets for its attention. Only with segments may rows share
    prefixes."""
    lengths = batch.lengths_S.tolist()
    if packing is Packing.SEGMENTS:
        parents = batch.parents_S.tolist()
        if sequence is not None and (padding := sequence.padding(len(batch.ids_N))):
            lengths, parents = [*lengths, padding], [*parents, -1]
        return {"segments": Segments(lengths, parents, sequence)}
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
    """Causal attention of each row of a pack, with the signature that transformers expects. Query, key and
    value are [B, heads, N, D], the result is [B, N, heads, D]. Without `segments`, the pack is one row.

    Raises ValueError for attention that is not causal, and for a mask, a cache or a position bias.
    """
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    unequal = query.shape[2] != key.shape[2]
    if not causal or unequal or attention_mask is not None or others.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} asks for attention that packed rows do not support")
    if segments is not None:
        segments.reached_attention = True
    segments = segments or Segments([query.shape[2]], [-1])
    sequence = segments.sequence
    if sequence is not None:
        query, key, value = (sequence.join(each) for each in (query, key, value))
        s_aux = None if s_aux is None else sequence.own_heads(s_aux)
    starts = [0, *accumulate(segments.lengths)]
    attended = []
    for first, count in segments.runs():
        start, length = starts[first], segments.lengths[first]
        q, k, v = (_stacked(each.narrow(2, start, count * length), count) for each in (query, key, value))
        if before := segments.before(first):
            parts = [slice(starts[each], starts[each + 1]) for each in before]
            k, v = (
                torch.cat([*(all_keys[:, :, part] for part in parts), own], 2)
                for all_keys, own in ((key, k), (value, v))
            )
        if softcap is None and s_aux is None:
            out = attend(q, k, v, scaling, sliding_window)
        else:
            out = _attend_by_scores(q, k, v, scaling, sliding_window, softcap, s_aux)
        attended.append(out.transpose(1, 2).reshape(query.shape[0], count * length, query.shape[1], -1))
    whole = torch.cat(attended, dim=1)
    return whole if sequence is None else sequence.part(whole), None


def _stacked(packed: Tensor, count: int) -> Tensor:
    """[B, heads, count · L, D] to [B · count, heads, L, D]: rows of equal length become one batch."""
    if count == 1:
        return packed
    batch, heads, tokens, width = packed.shape
    return packed.view(batch, heads, count, tokens // count, width).transpose(1, 2).flatten(0, 1)


def _attend_by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention with capped scores (Gemma 2) or with attention sinks (GPT-OSS). Torch has no kernel for
    either, so the full matrix of scores is computed. `sinks_H` holds one logit for each head."""
    heads, length = q.shape[1], q.shape[2]
    k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys = k.shape[2]
    scores = scores.masked_fill(~causal_mask(length, keys, window, q.device), -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, heads, 1, 1).expand(q.shape[0], heads, length, 1)
        scores = torch.cat([scores, sinks], dim=3)
    return scores.softmax(3)[..., :keys].to(v.dtype) @ v


def _only_attention_mixes_tokens(model: Any) -> bool:
    """Whether tokens exchange information only through attention that can be split at row bounds. In state
    spaces, linear attention, convolutions and attention in fixed chunks, they exchange it in other ways."""
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    convolves = any(isinstance(each, torch.nn.Conv1d) for each in model.modules())
    return types <= SPLITTABLE_LAYERS and not model._is_stateful and not convolves


def _keeps_masks(model: Any) -> bool:
    """Whether the model masks attention with a buffer for its longest row: a pack may be longer (GPT-Neo)."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return any(each.shape[-2:] == (longest, longest) for each in model.buffers())


def _parameters(model: Any) -> set[str]:
    return set(inspect.signature(type(model).forward).parameters)
