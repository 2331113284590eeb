"""Writes the changes of a version against an earlier one, so that servers which have that one fetch less.

new tensor, base tensor ─▶ same? ─▶ XOR ─▶ the smallest of dense, sparse and xor ─▶ v….safetensors.delta
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from rollout_queue.base_model.headers import ITEM_BYTES
from rollout_queue.contract.policies.delta import DELTA_SUFFIX, DeltaHeader, Encoding, TensorChange
from rollout_queue.contract.policies.policy import DeltaFile

LEVEL = 1
"""zstandard's level: changes are mostly zeros, and higher levels gain little."""
SPARSE_SHARE, XOR_SHARE = 0.3, 0.8
"""The largest shares of changed values for which these encodings are tried."""
Raw = npt.NDArray[np.uint8]


class _Stored(NamedTuple):
    """One tensor of a file: its type and shape, and its bytes, mapped from the disk."""

    dtype: str
    shape: tuple[int, ...]
    raw: Raw


def write_delta(directory: Path, base: Path) -> list[DeltaFile]:
    """For each weights file in `directory`, write a file of its changes against the tensors in `base`.

    Raises OSError.
    """
    earlier = {name: each for path in sorted(base.glob("*.safetensors")) for name, each in _tensors(path)}
    return [_write(path, earlier) for path in sorted(directory.glob("*.safetensors"))]


def encode(new: Raw, old: Raw | None, item_bytes: int) -> tuple[Encoding, bytes]:
    """The smallest encoding of a tensor's bytes. `old` has as many bytes, or is None without a base."""
    if old is None:
        return "dense", new.tobytes()
    words = f"<u{item_bytes}"
    changes = new.view(words) ^ old.view(words)
    count = np.count_nonzero(changes)
    if not count:
        return "same", b""
    share, compressor = count / len(changes), zstandard.ZstdCompressor(level=LEVEL)
    tried: list[tuple[Encoding, bytes]] = []
    if share <= SPARSE_SHARE and len(changes) < 2**32:
        (changed,) = np.nonzero(changes)  # 8 bytes for each
        gaps = np.diff(changed, prepend=0).astype("<u4")
        tried.append(("sparse", compressor.compress(gaps.tobytes() + changes[changed].tobytes())))
    if share <= XOR_SHARE:
        planes = np.ascontiguousarray(changes.view(np.uint8).reshape(-1, item_bytes).T)
        tried.append(("xor", compressor.compress(planes.tobytes())))
    encoding, payload = min(tried, key=lambda each: len(each[1]), default=("dense", b""))
    if encoding == "dense" or len(payload) >= new.nbytes:
        return "dense", new.tobytes()
    return encoding, payload


def _write(path: Path, earlier: dict[str, _Stored]) -> DeltaFile:
    target = path.with_name(path.name + DELTA_SUFFIX)
    changes: list[TensorChange] = []
    payloads = target.with_name(f".{target.name}.payloads")
    with payloads.open("wb") as file:
        for name, stored in _tensors(path):
            base = earlier.get(name)
            fits = base is not None and (base.dtype, base.shape) == (stored.dtype, stored.shape)
            old = base.raw if base is not None and fits else None
            encoding, payload = encode(stored.raw, old, ITEM_BYTES[stored.dtype])
            file.write(payload)
            changes.append(TensorChange(name, encoding, len(payload)))
    header = msgspec.json.encode(DeltaHeader(_header(path).decode(), changes))
    digest, size = hashlib.sha256(), 0
    with target.open("wb") as file, payloads.open("rb") as parts:
        chunk = len(header).to_bytes(8, "little") + header
        while chunk:
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
            chunk = parts.read(2**24)
    payloads.unlink()
    return DeltaFile(target.name, size, digest.hexdigest(), path.name)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _tensors(path: Path) -> Iterator[tuple[str, _Stored]]:
    """The tensors of a safetensors file, in the order of their bytes."""
    text = _header(path)
    header: dict[str, Any] = json.loads(text)
    header.pop("__metadata__", None)
    content = np.memmap(path, np.uint8, "r", offset=8 + len(text)) if header else np.empty(0, np.uint8)
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        yield name, _Stored(entry["dtype"], tuple(entry["shape"]), content[begin:end])
