"""Causal attention of rows, by kernels that keep no matrix of all pairs of tokens.

whole row         one causal call
rest of a row     blocks of queries ─▶ the keys before and their own, one mask each
sliding window w  the first w queries ─▶ one causal call
                  each later block of w queries ─▶ the keys of the block before and of its own, one mask
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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
    """[length, keys] bool: True where the token of the row attends to the token of the column. The tokens of
    the rows are the last of the columns. A token attends to itself and to all tokens before it; with a
    window, only to the last `window` tokens, itself included."""
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
