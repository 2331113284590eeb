"""Host memory for copies of tensors, which are written to files while the training goes on."""

from typing import TypeVar

import torch
from torch import Tensor

Place = TypeVar("Place")


def host_memory(pinned: dict[Place, Tensor], place: Place, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised host memory for a copy of `value` [any shape]: from CUDA that of `place` in `pinned`, to
    which it is added if it is missing, because pinning takes long; from the CPU memory of its own."""
    if not value.is_cuda:
        return torch.empty(value.shape, dtype=dtype)
    memory = pinned.get(place)
    if memory is None or (memory.shape, memory.dtype) != (value.shape, dtype):
        memory = pinned[place] = torch.empty(value.shape, dtype=dtype, pin_memory=True)
    return memory
