"""The protocol of sinks. A sink writes metrics for one tool that stores or draws them."""

from collections.abc import Mapping
from typing import Literal, Protocol

PointKind = Literal["step", "evaluation"]
"""A point of a step has all metrics of the step. A point of an evaluation has the score of a version, and
lies at the step that made the version."""


class Sink(Protocol):
    """Writes points. The exceptions that it raises are counted and logged, and the training goes on."""

    name: str

    def resume(self, step: int) -> None:
        """Continue after `step`. Points of later steps that an earlier process wrote no longer count. A sink
        that may have lost points up to `step` writes them again."""

    def write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        """Write one point. `step` is its place on the x axis, `time` is in seconds since 1970. If a step is
        repeated, its later point counts."""

    def close(self) -> None: ...
