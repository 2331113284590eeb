"""A copy of the weights in host memory, which is written to files while the training goes on.

every rank  gather ─▶ value ─▶ dtype of the base model ─▶ host memory of rank 0      (the training waits)
a thread    host memory ─▶ header, bytes ─▶ SHA-256 and file, in one pass            (the training goes on)
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rollout_queue.contract.policies.policy import FileSpec, TensorSpec
from trainer_service.model.export import NAMES, ExportTensor, StoredShape, header
from trainer_service.model.huggingface import WEIGHTS
from trainer_service.model.zero import gathered

FILE_BYTES = 4 * 2**30
"""The most bytes of tensors in one file, unless a single tensor has more."""
CHUNK_BYTES = 16 * 2**20
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class HostTensor:
    """One tensor in host memory, with the name and dtype of the base model's file."""

    name: str
    value: Tensor

    @property
    def shape(self) -> StoredShape:
        return StoredShape(self.name, tuple(self.value.shape), self.value.dtype)


@dataclass(frozen=True)
class WeightSnapshot:
    """The weights after one step. `write` may be called in another thread."""

    tensors: Sequence[HostTensor]

    def write(self, directory: Path, file_bytes: int = FILE_BYTES) -> list[FileSpec]:
        """Write the weights into `directory`, in files of at most `file_bytes` with an index, or in a single
        file. Returns what a manifest says of these files; no byte is read back. Raises OSError."""
        files = list(_files(self.tensors, file_bytes))
        if len(files) == 1:
            return [_write(directory / WEIGHTS, self.tensors)]
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        specs = [_write(directory / name, part) for name, part in zip(names, files, strict=True)]
        weight_map = {tensor.name: spec.name for spec in specs for tensor in spec.tensors}
        index = {"metadata": {"total_size": sum(map(_bytes, self.tensors))}, "weight_map": weight_map}
        text = json.dumps(index, indent=2).encode()
        (directory / INDEX).write_bytes(text)
        return [*specs, FileSpec(INDEX, len(text), hashlib.sha256(text).hexdigest())]


class SnapshotMemory:
    """Host memory for one snapshot. The next snapshot overwrites it: fresh memory takes longer to touch than
    the weights take to copy. On CUDA it is pinned."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(
        self, tensors: Sequence[ExportTensor], dtypes: Mapping[str, torch.dtype], *, keep: bool
    ) -> WeightSnapshot:
        """Copy the tensors into this memory. Every rank must call this, because it gathers. A rank that does
        not `keep` them returns an empty snapshot. A former snapshot may not be used any more."""
        kept = []
        for tensor in tensors:
            with gathered(tensor.sources):
                if keep:
                    value = self._copied(tensor.name, tensor.value().detach(), dtypes[tensor.name])
                    kept.append(HostTensor(tensor.name, value))
        return WeightSnapshot(kept)

    def _copied(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        memory = self._values.get(name)
        if memory is None or (memory.shape, memory.dtype) != (value.shape, dtype):
            memory = torch.empty(value.shape, dtype=dtype, pin_memory=value.is_cuda)
            self._values[name] = memory
        return memory.copy_(value)


def _files(tensors: Sequence[HostTensor], file_bytes: int) -> Iterator[list[HostTensor]]:
    part: list[HostTensor] = []
    size = 0
    for tensor in tensors:
        if part and size + _bytes(tensor) > file_bytes:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += _bytes(tensor)
    yield part


def _write(path: Path, tensors: Sequence[HostTensor]) -> FileSpec:
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in _chunks(tensors):
            digest.update(chunk)  # without Python's global lock, as the write
            file.write(chunk)
            size += len(chunk)
    specs = [TensorSpec(t.name, list(t.value.shape), NAMES[t.value.dtype]) for t in tensors]
    return FileSpec(path.name, size, digest.hexdigest(), sorted(specs, key=lambda spec: spec.name))


def _chunks(tensors: Sequence[HostTensor]) -> Iterator[memoryview]:
    yield memoryview(header([tensor.shape for tensor in tensors]))
    for tensor in tensors:
        content = tensor.value.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def _bytes(tensor: HostTensor) -> int:
    return tensor.value.numel() * tensor.value.itemsize
