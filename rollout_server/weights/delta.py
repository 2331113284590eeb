"""Makes a weights file of an earlier version and a file of changes. Its digest is that of the published file.

changes ─┐
base    ─┴▶ tensor after tensor ─▶ file, and the check of each byte (`file_check`)
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from rollout_queue.contract.published_policy import DeltaHeader, FileSpec, TensorChange
from rollout_server.weights.file_check import CheckedFile, CheckEnded, FileCheck
from rollout_server.weights.safetensors_file import (
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    BrokenWeights,
    StoredTensor,
    parse_header,
)

Raw = npt.NDArray[np.uint8]
Tensors = Mapping[str, tuple[Path, StoredTensor]]
"""By name: the file that has the tensor, and where."""


def apply_delta(
    changes: Path, base: Tensors, spec: FileSpec, target: Path, ended: Callable[[], bool] = lambda: False
) -> CheckedFile:
    """Write `target` from the file of changes and the base's tensors, and check it against `spec`.

    Raises BrokenWeights, OSError, and CheckEnded once `ended` returns True.
    """
    check = FileCheck(spec)
    with changes.open("rb") as file, target.open("wb") as made:
        header = _read_header(file, spec.name)
        text = header.header.encode()
        tensors = parse_header(text, spec.size, spec.name)
        for piece in _pieces(file, header, tensors, base, text):
            if ended():
                raise CheckEnded
            made.write(piece)
            check.feed(piece)
    return check.finish()


def _read_header(file: BinaryIO, name: str) -> DeltaHeader:
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise BrokenWeights("its file of changes has no header", file=name)
    try:
        return msgspec.json.decode(file.read(length), type=DeltaHeader)
    except msgspec.DecodeError as error:
        raise BrokenWeights(f"its file of changes has no header: {error}", file=name) from error


def _pieces(
    file: BinaryIO, header: DeltaHeader, tensors: Mapping[str, StoredTensor], base: Tensors, text: bytes
) -> Iterator[memoryview]:
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for change in header.changes:
        tensor = tensors.get(change.name)
        size = 0 if tensor is None else tensor.end - tensor.start
        if tensor is None or not 0 <= change.size <= max(size, 0):
            raise BrokenWeights("its change does not fit it", tensor=change.name)
        payload = file.read(change.size)
        if change.encoding == "dense":
            yield memoryview(payload)
        else:
            old = _old(base, tensor)
            new: memoryview = _changed(old, payload, change, ITEM_BYTES[tensor.dtype]).data
            yield new


def _old(base: Tensors, tensor: StoredTensor) -> Raw:
    if tensor.name not in base:
        raise BrokenWeights("is not in the base", tensor=tensor.name)
    path, stored = base[tensor.name]
    if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
        raise BrokenWeights("has another type or shape in the base", tensor=tensor.name)
    return np.fromfile(path, np.uint8, stored.end - stored.start, offset=stored.start)


def _changed(old: Raw, payload: bytes, change: TensorChange, item_bytes: int) -> Raw:
    """The tensor's new bytes. `old` is changed in place."""
    if change.encoding == "same":
        return old
    words = old.view(f"<u{item_bytes}")
    if change.encoding == "xor":
        planes = np.frombuffer(_decompressed(payload, old.nbytes, change.name), np.uint8)
        if len(planes) != old.nbytes:
            raise BrokenWeights("its change does not fit it", tensor=change.name)
        words ^= np.ascontiguousarray(planes.reshape(item_bytes, -1).T).reshape(-1).view(words.dtype)
        return old
    entry = 4 + item_bytes
    content = _decompressed(payload, entry * len(words), change.name)
    count, rest = divmod(len(content), entry)
    positions = np.cumsum(np.frombuffer(content, "<u4", count), dtype=np.uint64)
    if rest or (count and int(positions[-1]) >= len(words)):
        raise BrokenWeights("its change does not fit it", tensor=change.name)
    words[positions] ^= np.frombuffer(content, words.dtype, count, offset=4 * count)
    return old


def _decompressed(payload: bytes, most_bytes: int, name: str) -> bytes:
    """Raises BrokenWeights for anything but a frame of at most `most_bytes`."""
    try:
        if not 0 <= zstandard.frame_content_size(payload) <= most_bytes:
            raise BrokenWeights("its change does not fit it", tensor=name)
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=most_bytes)
    except zstandard.ZstdError as error:
        raise BrokenWeights(f"its change cannot be read: {error}", tensor=name) from error
