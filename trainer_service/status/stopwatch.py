"""Measures how many seconds each phase of a step takes."""

from collections.abc import Iterator
from contextlib import contextmanager

from rollout_queue import clock


class Stopwatch:
    """Adds up seconds by phase until they are read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = clock.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + clock.monotonic() - started

    def laps(self, tokens: float) -> dict[str, float]:
        """Metrics since the last call: seconds by phase, and tokens per second of the phase `train`."""
        seconds, self._seconds = self._seconds, {}
        rate = tokens / seconds["train"] if seconds.get("train") else 0.0
        return {"tokens_per_s": rate} | {f"seconds/{phase}": value for phase, value in seconds.items()}
