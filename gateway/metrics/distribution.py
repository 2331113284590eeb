"""Counters for what every call and token does: they cost a fraction of prometheus_client's own.

They belong to the event loop's thread. `collector.py` gives them to Prometheus.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from rollout_queue import clock


class Distribution:
    """A histogram: how many values are at most as large as each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """How many values lie between each bound and the one before; the last counts larger values."""
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Iterator[int]:
        """How many values are at most as large as each bound, and in all."""
        return accumulate(self.counts)


class TimeSpent:
    """The seconds that one part of the calls took, and how often it ran."""

    __slots__ = ("runs", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.runs = 0

    def since(self, began: float) -> float:
        """Count a run that ends now. `began` and the returned end are times of `clock.monotonic`."""
        ended = clock.monotonic()
        self.seconds += ended - began
        self.runs += 1
        return ended

    def add(self, seconds: float) -> None:
        """Count a run."""
        self.seconds += seconds
        self.runs += 1
