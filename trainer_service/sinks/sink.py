"""What takes figures down: one for each tool that draws them."""

from collections.abc import Mapping
from typing import Literal, Protocol

What = Literal["step", "evaluation"]
"""Of a step: all of its metrics. Of an evaluation: how a version does, at the step that made that version."""


class Sink(Protocol):
    """Whatever one raises is counted and logged, and the step goes on."""

    name: str

    def resume(self, step: int) -> None:
        """Training goes on behind `step`: what a process before this one wrote of later ones is void."""

    def write(self, what: What, values: Mapping[str, float]) -> None:
        """Take down one point; `step` is its place on the x axis and `time` is in seconds since 1970. The
        same step may come again: the later one counts."""

    def close(self) -> None: ...
