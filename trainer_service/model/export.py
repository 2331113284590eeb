"""Writes weights into a safetensors file, one tensor at a time, so that memory holds no second copy.

rank 0    ExportTensor ─ gather ─▶ value ─▶ dtype of the base model ─▶ file
rank 1 …  ExportTensor ─ gather ─▶ nothing
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from trainer_service.model.huggingface import SAFETENSORS_DTYPES
from trainer_service.model.zero import full_shape, gathered

NAMES = {getattr(torch, name): short for short, name in SAFETENSORS_DTYPES.items()}


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

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "ExportTensor":
        return cls(name, full_shape(tensor), [tensor], lambda: tensor)


def export_tensors(model: Any) -> Iterator[ExportTensor]:
    """The tensors of the model's file, with the names of the base model's file. Each tied tensor comes once.
    LoRA adapters are added to copies of the weights that they belong to."""
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    # keep_vars gives the parameters themselves: ZeRO marks its parameters with attributes, which copies lack.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tied or ".lora_" in name:
            continue
        layer, is_base, leaf = name.partition(".base_layer.")
        if is_base and leaf == "weight":
            yield _merged(f"{layer}.weight", tensor, adapted[layer])
        else:
            yield ExportTensor.of(f"{layer}.{leaf}" if is_base else name, tensor)


def _merged(name: str, base: Tensor, layer: Any) -> ExportTensor:
    (adapter,) = layer.active_adapters
    low_rank = [layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]

    def value() -> Tensor:
        delta: Tensor = layer.get_delta_weight(adapter)
        return base.float() + delta.float()

    return ExportTensor(name, full_shape(base), [base, *low_rank], value)


@torch.no_grad()
def write_tensors(
    path: Path | None, tensors: Sequence[ExportTensor], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Write the tensors in order. `dtypes` gives the dtype of each name. Every rank must call this. A rank
    without a path only takes part in gathering.

    If a write fails, raises OSError, but only after the last tensor is gathered, because the other ranks wait
    for this rank in every gathering."""
    if path is None:
        _gather_only(tensors)
        return
    failure: OSError | None = None
    left = iter(tensors)
    try:
        with path.open("wb") as file:
            file.write(header([StoredShape(each.name, each.shape, dtypes[each.name]) for each in tensors]))
            _stream(file, left, dtypes)
    except OSError as error:
        failure = error
    if failure is not None:
        _gather_only(left)
        raise failure


def _stream(file: BinaryIO, tensors: Iterator[ExportTensor], dtypes: Mapping[str, torch.dtype]) -> None:
    for tensor in tensors:
        with gathered(tensor.sources):
            value_cpu = tensor.value().detach().to("cpu", dtypes[tensor.name]).contiguous()
        file.write(value_cpu.reshape(-1).view(torch.uint8).numpy().data)


def _gather_only(tensors: Sequence[ExportTensor] | Iterator[ExportTensor]) -> None:
    for tensor in tensors:
        with gathered(tensor.sources):
            pass


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
