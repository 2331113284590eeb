"""Tells that a pass did not fit into the memory, and finds the rows that are too long for it.

a pass ─ OutOfMemory ─┬─ it had several rows ─▶ smaller micro-batches
                      └─ it had one row ─ first_too_long ─▶ a bound of the length of rows
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch


class Sized(Protocol):
    """Something with a length in tokens."""

    def __len__(self) -> int: ...


Measured = TypeVar("Measured", bound=Sized)
FAILED_ALLOCATIONS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""What torch's messages contain if an allocation has failed on CPU, in the CUDA runtime or in cuBLAS."""


class OutOfMemory(Exception):
    """A pass did not fit into the memory. The weights are unchanged, and no gradient is accumulated."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation has failed. Only torch's own allocator for CUDA has an exception for that."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in FAILED_ALLOCATIONS)


def first_too_long(rows: Sequence[Measured], fits: Callable[[Measured], bool]) -> Measured | None:
    """The shortest of these rows that does not fit, by bisection. None if the longest one fits."""
    rows = sorted(rows, key=len)
    if fits(rows[-1]):
        return None
    low, high = 0, len(rows) - 1  # those before `low` fit; the one at `high` does not
    while low < high:
        middle = (low + high) // 2
        if fits(rows[middle]):
            low = middle + 1
        else:
            high = middle
    return rows[high]
