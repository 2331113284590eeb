"""One line of the check of a GPU, and the memory that a call takes there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Check:
    """What was measured, and what it should be."""

    what: str
    measured: str
    expected: str
    ok: bool

    def line(self) -> str:
        return (
            f"{'ok    ' if self.ok else 'FAILED'}  {self.what}: {self.measured} (expected: {self.expected})"
        )


def at_most(what: str, measured: float, limit: float, unit: str = "") -> Check:
    """A check of a number that should not be above a limit; NaN fails."""
    return Check(what, f"{measured:.3g}{unit}", f"at most {limit:.3g}{unit}", measured <= limit)


def at_least(what: str, measured: float, limit: float, unit: str = "") -> Check:
    return Check(what, f"{measured:.3g}{unit}", f"at least {limit:.3g}{unit}", measured >= limit)


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """The bytes that a call takes on a GPU at its peak, beyond those that were taken before; 0 on CPU."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
