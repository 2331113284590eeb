"""Weights into a safetensors file, one tensor at a time: nowhere is the model a second time.

rank 0    Piece ─ gather ─▶ value ─▶ dtype of the base model ─▶ file
rank 1 …  Piece ─ gather ─▶ nothing
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer_service.model.huggingface import SAFETENSORS_DTYPES
from trainer_service.model.zero import whole, whole_shape

NAMES = {getattr(torch, name): short for short, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """One tensor of a file, and the weights that it is made of."""

    name: str
    shape: tuple[int, ...]
    sources: Sequence[Tensor]
    """What every rank gathers, before `value` may be asked for."""
    value: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Piece":
        return cls(name, whole_shape(tensor), [tensor], lambda: tensor)


def model_pieces(model: Any) -> Iterator[Piece]:
    """What the base model's file has: the same names, a tied tensor once; adapters are added to the weights
    that they belong to, which stay as they are."""
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    # Each parameter itself, not what state_dict() makes of it: ZeRO knows its own by their attributes.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tied or ".lora_" in name:
            continue
        layer, is_base, leaf = name.partition(".base_layer.")
        if is_base and leaf == "weight":
            yield _merged(f"{layer}.weight", tensor, adapted[layer])
        else:
            yield Piece.of(f"{layer}.{leaf}" if is_base else name, tensor)


def _merged(name: str, base: Tensor, layer: Any) -> Piece:
    (adapter,) = layer.active_adapters
    low_rank = [layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]

    def value() -> Tensor:
        delta: Tensor = layer.get_delta_weight(adapter)
        return base.float() + delta.float()

    return Piece(name, whole_shape(base), [base, *low_rank], value)


@torch.no_grad()
def write_pieces(path: Path | None, pieces: Sequence[Piece], dtypes: Mapping[str, torch.dtype]) -> None:
    """Write the pieces in their order, in the dtypes given by name. Every rank has to call it; one without a
    path gathers with the others.

    Raises OSError when the disk refuses, after the last piece: the other ranks must not wait for this one.
    """
    if path is None:
        _drain(pieces)
        return
    failure: OSError | None = None
    left = iter(pieces)
    try:
        with path.open("wb") as file:
            file.write(_header(pieces, dtypes))
            _stream(file, left, dtypes)
    except OSError as error:
        failure = error
    if failure is not None:
        _drain(left)
        raise failure


def _stream(file: BinaryIO, pieces: Iterator[Piece], dtypes: Mapping[str, torch.dtype]) -> None:
    for piece in pieces:
        with whole(piece.sources):
            tensor_cpu = piece.value().detach().to("cpu", dtypes[piece.name]).contiguous()
        file.write(tensor_cpu.reshape(-1).view(torch.uint8).numpy().data)


def _drain(pieces: Sequence[Piece] | Iterator[Piece]) -> None:
    for piece in pieces:
        with whole(piece.sources):
            pass


def _header(pieces: Sequence[Piece], dtypes: Mapping[str, torch.dtype]) -> bytes:
    """As safetensors has it: the length in 8 bytes, then JSON, filled up with blanks to a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for piece in pieces:
        end = offset + math.prod(piece.shape) * dtypes[piece.name].itemsize
        header[piece.name] = {
            "dtype": NAMES[dtypes[piece.name]],
            "shape": list(piece.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
