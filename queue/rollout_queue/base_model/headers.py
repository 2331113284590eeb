"""Reads the header of a safetensors file.

file = 8 bytes header length (little-endian) · JSON header {tensor: {dtype, shape, data_offsets}} · data
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per value of the types that weights may have."""
ITEM_BYTES = FLOATS | {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Also those of the other tensors in a model's files, such as whole numbers in buffers."""
MAX_HEADER_BYTES = 100_000_000
POINTER = b"version "
"""How a file begins that Git LFS would replace. No header is that long."""


class BrokenWeights(Exception):
    """A set of weights that must not reach an engine. The text names the file and, if known, the tensor."""

    def __init__(self, reason: str, *, file: str | None = None, tensor: str | None = None) -> None:
        where = f"{file or 'weights'}: " + (f"tensor {tensor!r}: " if tensor else "")
        super().__init__(where + reason)
        self.file = file
        self.tensor = tensor


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a header declares it; `start` and `end` count bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises BrokenWeights unless they fill the file exactly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        text = file.read(8)
        text += file.read(header_bytes(text, size, path.name) - 8)
    if len(text) < 8:
        raise BrokenWeights(f"is truncated: {size} bytes do not hold the header", file=path.name)
    return parse_header(text[8:], size, path.name)


def header_bytes(beginning: bytes | bytearray, size: int, name: str) -> int:
    """How many bytes the header of a file of `size` bytes has, with its length; 8 if `beginning` ends before
    that. Raises BrokenWeights if the file is too short for its header."""
    if size < 8:
        raise BrokenWeights(f"is truncated: {size} bytes do not hold the header", file=name)
    first = bytes(memoryview(beginning)[:8])
    if first == POINTER:
        raise BrokenWeights("is a pointer of Git LFS: fetch the file itself with `git lfs pull`", file=name)
    if len(first) < 8:
        return 8
    length = int.from_bytes(first, "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise BrokenWeights(f"is truncated: {size} bytes do not hold the header", file=name)
    return 8 + length


def parse_header(text: bytes, size: int, name: str) -> dict[str, StoredTensor]:
    """The tensors of a file of `size` bytes by name, from its header without the length. Raises BrokenWeights
    unless they fill the file exactly."""
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("not an object")
        header.pop("__metadata__", None)
        data_start = 8 + len(text)
        tensors = {each: _stored(name, each, entry, data_start) for each, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenWeights(f"has no safetensors header: {error}", file=name) from error
    _require_exact_fill(name, tensors, 8 + len(text), size)
    return tensors


def _stored(file: str, name: str, entry: Any, data_start: int) -> StoredTensor:
    dtype, shape = entry["dtype"], entry["shape"]
    begin, end = entry["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise BrokenWeights(f"dtype {dtype} is not one of {', '.join(FLOATS)}", file=file, tensor=name)
    numbers = [begin, end, *shape]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise BrokenWeights("shape or offsets are not whole numbers", file=file, tensor=name)
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise BrokenWeights(
            f"{end - begin} bytes do not hold shape {shape} of {dtype}", file=file, tensor=name
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _require_exact_fill(name: str, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != position:
            raise BrokenWeights("its bytes overlap others or leave a hole", file=name, tensor=tensor.name)
        position = tensor.end
    if position != size:
        raise BrokenWeights(f"is truncated or too long: {size} bytes, its header says {position}", file=name)
