"""A copy of the weights in host memory, which is written to files while the training goes on.

every rank  gather ─▶ the tensors it keeps ─▶ dtype of the base model ─▶ host memory    (the training waits)
a thread    host memory ─▶ header, bytes ─▶ SHA-256 and file, in one pass            (the training goes on)

Ranks that share a disk keep about as many bytes each, so no host memory holds the whole weights.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_queue.contract.published_policy import FileSpec, TensorSpec
from rollout_queue.model_files import INDEX
from trainer_service.model.export import NAMES, ExportTensor, StoredShape, header, in_turn
from trainer_service.model.huggingface import WEIGHTS

FILE_BYTES = 4 * 2**30
"""The most bytes of tensors in one file, unless a single tensor has more."""
CHUNK_BYTES = 16 * 2**20


def shares_of(sizes: Sequence[int], keepers: int) -> list[list[int]]:
    """Decides which rank keeps which tensor: the indices of each of the first `keepers` ranks. The largest
    tensor comes first. Each goes to the rank with the fewest bytes, so all ranks decide alike."""
    shares: list[list[int]] = [[] for _ in range(keepers)]
    held = [0] * keepers
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = held.index(min(held))
        shares[rank].append(index)
        held[rank] += sizes[index]
    return [sorted(share) for share in shares]


@dataclass(frozen=True)
class HostTensor:
    """One tensor in host memory, or mapped from the base model's file: with the name and dtype that it has
    there."""

    name: str
    value: Tensor
    lasts: bool = False
    """Whether it is the base model's, unchanged."""

    @property
    def shape(self) -> StoredShape:
        return StoredShape(self.name, tuple(self.value.shape), self.value.dtype)


class PlannedFile(NamedTuple):
    """A file of a version, and the rank that writes it."""

    rank: int
    name: str
    tensors: Sequence[StoredShape]


@dataclass(frozen=True)
class WeightSnapshot:
    """What this rank keeps of the weights after one step. `write` may be called in another thread."""

    tensors: Sequence[HostTensor]
    shares: Sequence[Sequence[StoredShape]] | None = None
    """What each rank keeps, by rank; None if this rank keeps everything."""
    rank: int = 0

    def write(self, directory: Path, file_bytes: int = FILE_BYTES) -> list[FileSpec]:
        """Write the weights into `directory`, in files of at most `file_bytes` with an index, or in a single
        file. Returns what a manifest says of these files; no byte is read back. Raises OSError."""
        return self.indexed(directory, self.write_share(directory, file_bytes))

    def write_share(self, directory: Path, file_bytes: int) -> list[FileSpec]:
        """Write the files of this rank, without the index."""
        own = {tensor.name: tensor for tensor in self.tensors}
        return [
            write_file(directory / name, [own[tensor.name] for tensor in tensors])
            for rank, name, tensors in _files(self._kept(), file_bytes)
            if rank == self.rank
        ]

    def indexed(self, directory: Path, specs: list[FileSpec]) -> list[FileSpec]:
        """Write the index of the files of all ranks, unless there is only one."""
        if len(specs) == 1:
            return specs
        weight_map = {tensor.name: spec.name for spec in specs for tensor in spec.tensors}
        total = sum(tensor.nbytes for share in self._kept() for tensor in share)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()
        (directory / INDEX).write_bytes(text)
        return [*specs, FileSpec(INDEX, len(text), hashlib.sha256(text).hexdigest())]

    def _kept(self) -> Sequence[Sequence[StoredShape]]:
        return self.shares if self.shares is not None else [[tensor.shape for tensor in self.tensors]]


class SnapshotMemory:
    """Host memory for one snapshot. The next snapshot overwrites it: fresh memory takes longer to touch than
    the weights take to copy. On CUDA it is pinned."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(
        self,
        tensors: Sequence[ExportTensor],
        dtypes: Mapping[str, torch.dtype],
        *,
        rank: int = 0,
        keepers: int = 1,
    ) -> WeightSnapshot:
        """Copy the share of this `rank` into this memory. The first `keepers` ranks have a share. Every rank
        must call this, because it gathers. A former snapshot may not be used any more."""
        shapes = [StoredShape(tensor.name, tensor.shape, dtypes[tensor.name]) for tensor in tensors]
        indices = shares_of([shape.nbytes for shape in shapes], keepers)
        own = set(indices[rank]) if rank < keepers else set()
        kept = []
        for index, tensor in enumerate(in_turn(tensors)):
            if index in own:
                dtype = dtypes[tensor.name]
                value = tensor.value_for(dtype)
                value = value if tensor.lasts else self._copied(tensor.name, value, dtype)
                kept.append(HostTensor(tensor.name, value, tensor.lasts))
        return WeightSnapshot(kept, [[shapes[index] for index in share] for share in indices], rank)

    def _copied(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        memory = self._values.get(name)
        if memory is None or (memory.shape, memory.dtype) != (value.shape, dtype):
            memory = torch.empty(value.shape, dtype=dtype, pin_memory=value.is_cuda)
            self._values[name] = memory
        return memory.copy_(value)


def _files(shares: Sequence[Sequence[StoredShape]], file_bytes: int) -> list[PlannedFile]:
    """The files of all ranks. Their names depend only on the shapes and the number of ranks."""
    parts = [(rank, part) for rank, share in enumerate(shares) for part in _parts(share, file_bytes)]
    if len(parts) == 1:
        ((rank, part),) = parts
        return [PlannedFile(rank, WEIGHTS, part)]
    return [
        PlannedFile(rank, f"model-{number:05d}-of-{len(parts):05d}.safetensors", part)
        for number, (rank, part) in enumerate(parts, 1)
    ]


def _parts(tensors: Sequence[StoredShape], file_bytes: int) -> Iterator[list[StoredShape]]:
    part: list[StoredShape] = []
    size = 0
    for tensor in tensors:
        if part and size + tensor.nbytes > file_bytes:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.nbytes
    if part:
        yield part


def write_file(path: Path, tensors: Sequence[HostTensor]) -> FileSpec:
    """Write a safetensors file. Returns what a manifest says of it; no byte is read back. Raises OSError."""
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
