"""Compares the values of two sets of weights, whose headers `rollout_queue.model_files` reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_queue.model_files import (
    FLOATS,
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    BrokenWeights,
    StoredTensor,
    header_bytes,
    parse_header,
    read_header,
    weight_files,
)
from rollout_queue.protocol.rollout_server_messages import FINGERPRINT_VALUES

__all__ = [
    "FLOATS",
    "ITEM_BYTES",
    "MAX_HEADER_BYTES",
    "BrokenWeights",
    "StoredTensor",
    "fingerprint",
    "header_bytes",
    "parse_header",
    "read_header",
    "tensors_of",
    "weights_differ",
]
EXPONENT_MASKS = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80, "F64": 0x7FF0_0000_0000_0000}
"""A float whose exponent bits are all set is infinity or NaN. numpy has no BF16, so the bits are tested."""
CHUNK_BYTES = 16 * 2**20


def tensors_of(directory: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """The tensors of a model's or a version's files. Raises BrokenWeights, OSError."""
    files = weight_files(directory)
    return {name: (file, tensor) for file in files for name, tensor in read_header(file).items()}


def weights_differ(one: Path, other: Path, *, float32_engine: bool) -> bool:
    """Whether an engine certainly holds other values after loading `one` than after loading `other`.

    Tensors that the engine may round to the same values do not count. Equal weights may lie in different
    files (metadata, sharding), so values are compared, up to the first difference.
    """
    ones, others = tensors_of(one), tensors_of(other)
    for name in sorted(ones.keys() & others.keys()):
        (path, tensor), (other_path, other_tensor) = ones[name], others[name]
        if tensor.dtype != other_tensor.dtype or tensor.dtype not in FLOATS:
            continue
        if not (float32_engine or tensor.dtype == "BF16"):
            continue
        pairs = zip(_bits(path, tensor), _bits(other_path, other_tensor), strict=True)
        if any(not np.array_equal(bits, other_bits) for bits, other_bits in pairs):
            return True
    return False


def fingerprint(path: Path, tensor: StoredTensor) -> int:
    """The sum of the bits of the tensor's first values, taken as signed whole numbers."""
    item_bytes = ITEM_BYTES[tensor.dtype]
    count = min((tensor.end - tensor.start) // item_bytes, FINGERPRINT_VALUES)
    return int(np.fromfile(path, f"<i{item_bytes}", count, offset=tensor.start).sum(dtype=np.int64))


def _bits(path: Path, tensor: StoredTensor) -> Iterator[npt.NDArray[np.unsignedinteger[Any]]]:
    # The file is not memory-mapped, because a file that shrinks would kill the process that maps it.
    item_bytes = ITEM_BYTES[tensor.dtype]
    for start in range(tensor.start, tensor.end, CHUNK_BYTES):
        count = (min(CHUNK_BYTES, tensor.end - start)) // item_bytes
        yield np.fromfile(path, dtype=f"<u{item_bytes}", count=count, offset=start)
