"""The protocol of sinks: one for each tool that stores or draws metrics."""

from collections.abc import Mapping
from typing import Literal, Protocol

PointKind = Literal["step", "evaluation"]
"""A step has all of its metrics. An evaluation has the score of a version, at the step that made it."""


class Sink(Protocol):
    """Exceptions of a sink are counted and logged, and the training goes on."""

    name: str

    def resume(self, step: int) -> None:
        """Training continues after `step`: points of later steps, written by an earlier process, are void."""

    def write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        """Write one point. `step` is its place on the x axis, `time` is in seconds since 1970. Where a step
        comes again, the later point counts."""

    def close(self) -> None: ...
