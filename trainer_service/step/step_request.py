"""Asks for one optimizer step of a policy, or for a part of that step's gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.rows.rows import Row
from trainer_service.settings import RecordedTokens


def _no_beat() -> None: ...


@dataclass(frozen=True)
class StepRequest:
    """The rows to train, and the settings of the algorithm."""

    rows: Sequence[Row]
    version: int
    """The version of the weights before the step. All parts of one step have the same version."""
    algorithm: AlgorithmSettings
    beat: Callable[[], None] = _no_beat
    """Called between micro-batches, so that a long step still reports that the trainer is alive."""
    recorded: RecordedTokens = "none"
    """What is recorded of each trained token."""

    def with_rows(self, rows: Sequence[Row]) -> "StepRequest":
        return replace(self, rows=rows)

    def for_other_ranks(self) -> "StepRequest":
        """The same request without `beat`, because only rank 0 reports progress."""
        return replace(self, beat=_no_beat)
