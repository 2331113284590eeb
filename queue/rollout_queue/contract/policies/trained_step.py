"""One optimizer step of the trainer, as Redis keeps it: which version it began from and which one it made.

version 7 ◀─ base ─ TrainedStep 12 ─▶ version 8 ◀─ base ─ TrainedStep 13 ─▶ version 9
"""

from collections.abc import Mapping

import msgspec


class TrainedStep(msgspec.Struct, frozen=True):
    """A durable step. The counts are those of the step, also after its sessions were deleted or forgotten."""

    step: int
    version: int
    """The version that the step made."""
    base: int
    """The version of the weights before the step."""
    turns: int
    sessions: int
    tokens: int
    """The trained tokens."""


def chain(version: int, made: Mapping[int, TrainedStep]) -> list[TrainedStep]:
    """The steps that led to `version`, the last one first, as far as `made` has them. `made` has steps by the
    version that they made. The chain ends at a version that no step made, such as one that was restored."""
    steps: list[TrainedStep] = []
    while (step := made.get(version)) is not None and step.base < version:
        steps.append(step)
        version = step.base
    return steps
