"""Copies the files of a checkpoint into host memory, so that they are written while the training goes on.

DeepSpeed ─ save_checkpoint ─▶ FileCopies: host memory      (the training waits)
a thread       host memory ─ write ─▶ files                 (the training goes on)
"""

import copy
import ctypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
