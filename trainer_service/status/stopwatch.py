"""Measures how many seconds each phase of a step takes, and how long the trainer has run."""

from collections.abc import Iterator
from contextlib import contextmanager

from rollout_queue import clock


class Stopwatch:
    """Adds up seconds by phase until they are read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._began = clock.monotonic()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = clock.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + clock.monotonic() - started

    def laps(self, tokens: float) -> dict[str, float]:
        """Metrics since the last call: seconds by phase, and tokens per second of the phase `train`; and the
        seconds since the start, by which a restart is seen in a curve."""
        seconds, self._seconds = self._seconds, {}
        rate = tokens / seconds["train"] if seconds.get("train") else 0.0
        phases = {f"seconds/{phase}": value for phase, value in seconds.items()}
        return {"tokens_per_s": rate, "seconds/uptime": clock.monotonic() - self._began} | phases
