"""Checks one file of a policy in a single pass over its bytes, as they arrive or as they are read.

bytes ─▶ SHA-256
     └─▶ safetensors header ─▶ tensors ─▶ every float finite?

The values of two sets of weights are compared; `rollout_queue.model_files` reads their headers.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_queue.contract.published_policy import FileSpec
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


WEIGHTS_SUFFIX = ".safetensors"
READ_BYTES = 4 * 2**20
SCAN_ITEMS = 2**17
"""How many values are tested at once: they stay in the processor's cache."""


class WrongDigest(BrokenWeights):
    """The bytes are not those that were published: the file is broken, or a byte changed on its way."""


class CheckEnded(Exception):
    """Nobody waits for the result any more."""


@dataclass(frozen=True)
class CheckedFile:
    """A file whose size and digest are those of the manifest."""

    name: str
    tensors: Mapping[str, StoredTensor]
    infinities: tuple[str, ...] = ()
    """The tensors that hold an infinity or a NaN."""

    @property
    def infinite(self) -> str | None:
        """The first of them."""
        return next(iter(self.infinities), None)


class FileCheck:
    """The check of one file. Its bytes are fed in order."""

    def __init__(self, spec: FileSpec) -> None:
        self._spec = spec
        self._digest = hashlib.sha256()
        self._size = 0
        self._header = bytearray()
        self._left: list[StoredTensor] | None = None
        """The tensors whose bytes are not all here, the next one last; None before the header is read."""
        self._tensors: dict[str, StoredTensor] = {}
        self._carry = b""
        """The first bytes of a value whose other bytes have not come yet."""
        self._fault: BrokenWeights | None = None
        self._infinities: list[str] = []
        self._scans = spec.name.endswith(WEIGHTS_SUFFIX)

    @property
    def size(self) -> int:
        """How many bytes were fed."""
        return self._size

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        view = memoryview(data)
        self._digest.update(view)
        position, self._size = self._size, self._size + len(view)
        if not self._scans or self._fault is not None:
            return
        if self._left is None:
            rest = self._take_header(view)
            position, view = position + len(view) - len(rest), rest
        while view and self._left:
            tensor = self._left[-1]
            piece = view[: tensor.end - position]
            self._scan(tensor, piece)
            position, view = position + len(piece), view[len(piece) :]
            if position == tensor.end:
                self._left.pop()
                self._carry = b""

    def finish(self) -> CheckedFile:
        """The result, once all bytes were fed. Raises BrokenWeights."""
        spec = self._spec
        if self._size != spec.size:
            raise BrokenWeights(f"has {self._size} bytes, the manifest says {spec.size}", file=spec.name)
        if self._digest.hexdigest() != spec.sha256.lower():
            raise WrongDigest("its SHA-256 is not the manifest's", file=spec.name)
        if self._scans and self._left is None and self._fault is None:
            self._fault = BrokenWeights("is truncated: its header is not complete", file=spec.name)
        if self._fault is not None:
            raise self._fault
        return CheckedFile(spec.name, self._tensors, tuple(self._infinities))

    def _take_header(self, view: memoryview) -> memoryview:
        """Collect the header. Returns the bytes that follow it."""
        try:
            wanted = header_bytes(self._header, self._spec.size, self._spec.name)
            while len(self._header) < wanted and view:
                missing = wanted - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                wanted = header_bytes(self._header, self._spec.size, self._spec.name)
            if len(self._header) == wanted:
                text = bytes(self._header[8:])
                self._tensors = parse_header(text, self._spec.size, self._spec.name)
                self._left = sorted(self._tensors.values(), key=lambda each: -each.start)
                self._left = [each for each in self._left if each.end > each.start]
                self._header = bytearray()
        except BrokenWeights as error:
            self._fault = error
        return view

    def _scan(self, tensor: StoredTensor, piece: memoryview) -> None:
        if tensor.name in self._infinities[-1:] or tensor.dtype not in EXPONENT_MASKS:
            return
        item_bytes, mask = ITEM_BYTES[tensor.dtype], EXPONENT_MASKS[tensor.dtype]
        if self._carry:
            taken = item_bytes - len(self._carry)
            self._carry += bytes(piece[:taken])
            piece = piece[taken:]
            if len(self._carry) < item_bytes:
                return
            whole, self._carry = self._carry, b""
            if int.from_bytes(whole, "little") & mask == mask:
                self._infinities.append(tensor.name)
                return
        count = len(piece) // item_bytes
        bits = np.frombuffer(piece, dtype=f"<u{item_bytes}", count=count)
        self._carry = bytes(piece[count * item_bytes :])
        for start in range(0, count, SCAN_ITEMS):
            if np.any((bits[start : start + SCAN_ITEMS] & mask) == mask):
                self._infinities.append(tensor.name)
                return


def check_path(path: Path, spec: FileSpec, ended: Callable[[], bool] = lambda: False) -> CheckedFile:
    """Check a file on the disk. Raises BrokenWeights, OSError, and CheckEnded once `ended` returns True."""
    if not path.is_file() or path.is_symlink():
        raise BrokenWeights("is missing", file=spec.name)
    size = path.stat().st_size
    if size != spec.size:
        raise BrokenWeights(f"has {size} bytes, the manifest says {spec.size}", file=spec.name)
    with path.open("rb", buffering=0) as file:
        return _checked(file, spec, ended)


def copy_checked(source: Path, target: Path, spec: FileSpec, ended: Callable[[], bool]) -> CheckedFile:
    """Copy a file, and check what is copied. Raises as `check_path` does."""
    with source.open("rb", buffering=0) as file, target.open("wb") as copy:
        return _checked(file, spec, ended, copy.write)


def _checked(
    file: FileIO,
    spec: FileSpec,
    ended: Callable[[], bool],
    take: Callable[[memoryview], object] | None = None,
) -> CheckedFile:
    check, buffer = FileCheck(spec), bytearray(READ_BYTES)
    while count := file.readinto(buffer):
        if ended():
            raise CheckEnded
        piece = memoryview(buffer)[:count]
        if take is not None:
            take(piece)
        check.feed(piece)
    return check.finish()
