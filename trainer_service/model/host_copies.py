"""Copies in host memory, which are written to files while the training goes on: of the weights that are
published, and of the files of a checkpoint.

weights     every rank  gather ─▶ the tensors it keeps ─▶ dtype of the base model ─▶ host memory
            a thread    host memory ─▶ header, bytes ─▶ SHA-256 and file, in one pass
checkpoint  DeepSpeed ─ save_checkpoint ─▶ FileCopies: host memory ─ a thread writes ─▶ files

The training waits while a copy is taken. Ranks that share a disk keep about as many bytes of the weights
each, so no host memory holds the whole weights.
"""

import copy
import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_queue.contract.published_policy import FileSpec, TensorSpec
from rollout_queue.model_files import INDEX
from trainer_service.model.exported_tensors import NAMES, ExportTensor, StoredShape, header, in_turn
from trainer_service.model.huggingface import WEIGHTS

FILE_BYTES = 4 * 2**30
"""The most bytes of tensors in one file, unless a single tensor has more."""
CHUNK_BYTES = 16 * 2**20


def shares_of(sizes: Sequence[int], keepers: int) -> list[list[int]]:
    """Decides which rank keeps which tensor: the indices of each of the first `keepers` ranks. The largest
    tensor comes first. Each goes to the rank with the fewest bytes, so all ranks decide alike."""
    shares: list[list[int]] = [[] for _ in range(keepers)]
    held = [0] * keepers
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
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
    return FileSpec(path.name, size, digest.hexdigest(), sorted(specs, key=attrgetter("name")))


def _chunks(tensors: Sequence[HostTensor]) -> Iterator[memoryview]:
    yield memoryview(header([tensor.shape for tensor in tensors]))
    for tensor in tensors:
        content = tensor.value.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


TensorKey = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class StateCopy:
    """Everything that one rank keeps of a checkpoint, until it is written."""

    parts: Mapping[str, Callable[[Path], object]]
    """What writes the files of each subdirectory into it."""

    def write(self, directory: Path) -> None:
        """Write this rank's files below `directory`. May be called in another thread. Raises OSError, or the
        RuntimeError of torch's writer."""
        for name, write in self.parts.items():
            (directory / name).mkdir(parents=True, exist_ok=True)
            write(directory / name)


@dataclass(frozen=True)
class CopiedFiles:
    """The files of one copy, by name."""

    files: Mapping[str, Any]

    def write(self, directory: Path) -> None:
        """Write the files into `directory`."""
        for name, state in self.files.items():
            torch.save(state, directory / name)


class FileCopies:
    """Copies what one DeepSpeed engine would write into a checkpoint. From CUDA, the next copy overwrites the
    former: the memory is pinned, which takes long. From the CPU, each copy has memory of its own, which is
    free as soon as the copy is written."""

    def __init__(self, engine: Any) -> None:
        """From now on, the engine gives its files to this object, and writes none itself."""
        self._engine = engine
        self._files: dict[str, Any] = {}
        self._pinned: dict[tuple[object, ...], Tensor] = {}
        self._seen: dict[TensorKey, Tensor] = {}
        engine.checkpoint_engine.save = self._add
        engine.checkpoint_engine.makedirs = _write_nothing
        engine._copy_recovery_script = _write_nothing  # a private name of the pinned release

    @torch.no_grad()
    def take(self, client_state: dict[str, Any], *, without_frozen: bool = False) -> CopiedFiles:
        """Copy the engine's states. Every rank must call it. The former copy may not be used any more."""
        _trim()
        self._engine.save_checkpoint(
            ".",
            tag="copy",
            client_state=client_state,
            save_latest=False,
            exclude_frozen_parameters=without_frozen,
        )
        files, self._files = self._files, {}
        return CopiedFiles(files)

    def _add(self, state_dict: Any, path: str) -> None:
        name = Path(path).name
        self._files[name] = self._copied(state_dict, (name,))
        self._seen = {}  # only now, because tensors of the next file may get the same addresses

    def _copied(self, value: Any, place: tuple[object, ...]) -> Any:
        """A copy of nested containers. `place` has the keys that lead to the value."""
        if isinstance(value, Tensor):
            return self._copied_tensor(value, place)
        if isinstance(value, dict):
            copied = copy.copy(value)
            for key, each in value.items():
                copied[key] = self._copied(each, (*place, key))
            return copied
        if isinstance(value, list | tuple):
            items = [self._copied(each, (*place, index)) for index, each in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return copy.deepcopy(value)

    def _copied_tensor(self, value: Tensor, place: tuple[object, ...]) -> Tensor:
        """Names that share a tensor share its copy, too."""
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if key not in self._seen:
            self._seen[key] = self._memory(value, place).copy_(value)
        return self._seen[key]

    def _memory(self, value: Tensor, place: tuple[object, ...]) -> Tensor:
        if not value.is_cuda:
            return torch.empty(value.shape, dtype=value.dtype)
        memory = self._pinned.get(place)
        if memory is None or (memory.shape, memory.dtype) != (value.shape, value.dtype):
            memory = self._pinned[place] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return memory


def _trim() -> None:
    """Give free memory back to the operating system. The C library keeps what a step's tensors took, and a
    copy beside it takes memory of its own."""
    with suppress(OSError, AttributeError):  # a system without glibc
        ctypes.CDLL(None).malloc_trim(0)


def _write_nothing(*_: object, **__: object) -> None:
    """In place of DeepSpeed's writes, which would come before the files' own."""
