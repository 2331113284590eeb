"""Writes weights into a safetensors file, one tensor at a time, so that memory holds no second copy.

rank 0    ExportTensor ─ gather ─▶ value ─▶ dtype of the base model ─▶ file
rank 1 …  ExportTensor ─ gather ─▶ nothing

The values of merged adapters are rounded stochastically to the dtype of the base model.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer_service.model.huggingface import STORED_DTYPES
from trainer_service.model.zero import full_shape, gathered

NAMES = {getattr(torch, name): short for short, name in STORED_DTYPES.items()}
ROUNDED_AT_ONCE = 2**18
"""How many values are rounded at once: few enough for the cache of a CPU."""


class StoredShape(NamedTuple):
    """What a header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExportTensor:
    """One tensor of a file, and the weights that it is computed from."""

    name: str
    shape: tuple[int, ...]
    sources: Sequence[Tensor]
    """The weights that every rank must gather before `value` is called."""
    value: Callable[[], Tensor]
    """Computes the tensor from the gathered weights."""
    seed: int | None = None
    """With a seed, `value` is float32 and is rounded stochastically."""
    lasts: bool = False
    """Whether the value stays as it is, so that a snapshot need not copy it."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "ExportTensor":
        return cls(name, full_shape(tensor), [tensor], tensor.detach)

    @classmethod
    def in_file(cls, name: str, tensor: Tensor) -> "ExportTensor":
        """A tensor that no training changes, mapped from the base model's file."""
        return cls(name, tuple(tensor.shape), [], tensor.detach, lasts=True)

    def value_for(self, dtype: torch.dtype) -> Tensor:
        """The tensor from the gathered weights, for a file with this dtype. The caller converts it."""
        value = self.value().detach()
        if self.seed is None or dtype not in (torch.bfloat16, torch.float16):
            return value
        return stochastically_rounded(value, dtype, self.seed)


def export_tensors(model: Any, merge_seed: int | None = None) -> Iterator[ExportTensor]:
    """The weights that are trained, with the names of the base model's file. Each tied tensor comes once.
    LoRA adapters are added to copies of the weights that they belong to; with a `merge_seed`, the sums are
    rounded stochastically."""
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    # keep_vars gives the parameters themselves: ZeRO marks its parameters with attributes, which copies lack.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tied or ".lora_" in name:
            continue
        layer, is_base, leaf = name.partition(".base_layer.")
        if is_base and leaf == "weight":
            yield _merged(_stored_name(model, f"{layer}.weight"), tensor, adapted[layer], merge_seed)
        elif tensor.requires_grad:  # neither a buffer nor a weight that is frozen
            yield from _stored(model, f"{layer}.{leaf}" if is_base else name, tensor)


def tied_names(model: Any) -> set[str]:
    """The names in files of the tensors that are left out, because they are tied to others."""
    meta, found = torch.empty(0, device="meta"), set[str]()
    for name in getattr(model, "all_tied_weights_keys", {}):
        found |= {name, *_unfused(model, name, meta)}
    return found


def in_turn(tensors: Iterable[ExportTensor]) -> Iterator[ExportTensor]:
    """The tensors in order, each while its sources are gathered. Consecutive tensors with the same sources,
    such as the experts of a layer, share one gathering. Every rank must take all of them."""
    for _, some in groupby(tensors, key=lambda tensor: [id(source) for source in tensor.sources]):
        together = list(some)
        with gathered(together[0].sources):
            yield from together


def _stored(model: Any, name: str, tensor: Tensor) -> Iterator[ExportTensor]:
    """The tensors of the file that transformers has loaded as this one; it fuses experts, for instance."""
    shape = torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")
    parts = _unfused(model, name, shape)
    if parts.keys() == {name}:
        yield ExportTensor.of(name, tensor)
        return
    for part, meta in parts.items():
        value = partial(_part, model, name, tensor, part)
        yield ExportTensor(part, tuple(meta.shape), [tensor], value)


def _part(model: Any, name: str, tensor: Tensor, part: str) -> Tensor:
    return _unfused(model, name, tensor.detach())[part]


def _unfused(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return found


def _stored_name(model: Any, name: str) -> str:
    """The name in files of a weight that is no part of another one there."""
    names = list(_unfused(model, name, torch.empty(0, device="meta")))
    return names[0] if len(names) == 1 else name


def _merged(name: str, base: Tensor, layer: Any, merge_seed: int | None) -> ExportTensor:
    (adapter,) = layer.active_adapters
    low_rank = [layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]

    def value() -> Tensor:
        delta: Tensor = layer.get_delta_weight(adapter)
        return base.float() + delta.float()

    seed = None
    if merge_seed is not None:
        # The version is no part of the seed: two versions then differ only where the exact sums have moved
        # across the drawn threshold, and their difference is small.
        seed = int.from_bytes(hashlib.sha256(f"{merge_seed} {name}".encode()).digest()[:7])
    return ExportTensor(name, full_shape(base), [base, *low_rank], value, seed)


def stochastically_rounded(value: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Round float32 to bfloat16 or float16 without a bias: to the neighbour above with probability
    (x - below) / (above - below), otherwise to the one below (Gupta et al. 2015, arXiv:1502.02551).

    Rounding to the nearest loses changes that are smaller than half the distance of two neighbours. What
    `dtype` can represent stays as it is. A finite value beyond the largest finite one becomes that one. The
    same seed gives the same result.
    """
    generator = torch.Generator(value.device).manual_seed(seed)
    rounded = torch.empty(value.shape, dtype=dtype, device=value.device)
    exact, made = value.reshape(-1), rounded.view(-1)
    for start in range(0, len(exact), ROUNDED_AT_ONCE):
        part, target = (each[start : start + ROUNDED_AT_ONCE] for each in (exact, made))
        words = torch.empty(-(-len(part) // 4), dtype=torch.int64, device=part.device)
        words.random_(-(2**63), None, generator=generator)  # a number of 64 bits costs as much as one of 16
        draws = words.view(torch.int16)[: len(part)].to(torch.int32).add_(2**15)  # 0 … 2¹⁶ - 1
        target.copy_(_to_bfloat16(part, draws) if dtype is torch.bfloat16 else _to_float16(part, draws))
        most = torch.finfo(dtype).max
        inside = part.abs() < most
        if not inside.all():  # infinities, NaN, and what has no neighbour above
            edge = torch.where(part.isfinite(), part.clamp(-most, most), part)
            target.copy_(torch.where(inside, target, edge.to(dtype)))
    return rounded


def _to_bfloat16(exact: Tensor, draws: Tensor) -> Tensor:
    """bfloat16 is float32 without its last 16 bits. A number of 16 random bits, added to them, carries into
    the others with the right probability."""
    bits = draws.add_(exact.view(torch.int32)).bitwise_right_shift_(16)
    return bits.to(torch.int16).view(torch.bfloat16)


def _to_float16(exact: Tensor, draws: Tensor) -> Tensor:
    near = exact.to(torch.float16)
    error = exact - near.float()
    away = exact.abs() > near.float().abs()  # the other neighbour has a larger magnitude
    other = (near.view(torch.int16) + torch.where(away, 1, -1).to(torch.int16)).view(torch.float16)
    gap = (other.float() - near.float()).abs()
    return torch.where(draws * gap < error.abs() * 2**16, other, near)


def check_tensor_names(model: Any, dtypes: Mapping[str, torch.dtype], path: Path) -> None:
    """Raises SystemExit for a model whose weights have other names in memory than in its files, `dtypes`."""
    if missing := {tensor.name for tensor in export_tensors(model)} - set(dtypes):
        raise SystemExit(
            f"trainer.model_path: {path} has no tensor {sorted(missing)[0]}, but the loaded model has, and "
            "it could not be published"
        )


def header(tensors: Sequence[StoredShape]) -> bytes:
    """The header of a safetensors file: its length in 8 bytes, then JSON, padded with blanks to a multiple of
    8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
