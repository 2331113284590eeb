"""A stand-in for the package flash-attn 2.8, which needs a GPU: the function that transformers uses for packs
of rows, with the same signature, and attention in float32 on CPU."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class VarlenCall:
    """What one call of `flash_attn_varlen_func` got."""

    bounds: Sequence[int]
    longest: int
    window: tuple[int, int]
    heads: int
    key_heads: int
    dtype: torch.dtype


CALLS: list[VarlenCall] = []
"""Transformers imports the functions once for each process, so all fakes record here."""


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """[N, heads, D], from queries [N, heads, D] and keys and values of perhaps fewer heads."""
    assert q.dtype in (torch.float16, torch.bfloat16), "the real one takes only these"
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert isinstance(max_seqlen_q, int)
    assert isinstance(max_seqlen_k, int)
    assert causal
    assert dropout_p == 0
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q == max_seqlen_k == max(b - a for a, b in pairwise(bounds))
    CALLS.append(VarlenCall(bounds, max_seqlen_q, window_size, q.shape[1], k.shape[1], q.dtype))
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    parts = [
        _attention(q[start:end], k[start:end], v[start:end], scale, window_size[0], softcap)
        for start, end in pairwise(bounds)
    ]
    return torch.cat(parts).to(q.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, softcap: float) -> Tensor:
    q, k, v = (each.float().repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (q, k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (distance >= 0) & ((distance <= left) | (left < 0))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(2), v)


def install_fake_flash(patch: pytest.MonkeyPatch) -> None:
    """Make transformers find the package, and a device for it."""
    import transformers.modeling_flash_attention_utils as flash_utils
    import transformers.utils

    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    vars(package).update(
        flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_func=None, flash_attn_with_kvcache=None
    )
    vars(padding).update(pad_input=None, unpad_input=None)
    patch.setitem(sys.modules, "flash_attn", package)
    patch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    patch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: True)
    patch.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
    always = {"general_availability_check": lambda: True, "supported_devices": ((lambda: True, "cuda"),)}
    versions = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    patch.setitem(versions, 2, {**versions[2], **always})
    CALLS.clear()
