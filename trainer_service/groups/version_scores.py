"""How versions do in training: by the rewards of the sessions that they sampled."""

from collections.abc import Collection
from math import sqrt
from typing import NamedTuple

CAUTION = 2.0
"""Standard errors by which a mean counts for less: few lucky sessions are no proof."""


class VersionScore(NamedTuple):
    """What is known of one version."""

    version: int
    sessions: int
    reward: float
    """Mean."""


class VersionScores:
    """The rewards of this process's time. A version that nobody sampled has none, and is never the best."""

    def __init__(self) -> None:
        self._known: dict[int, VersionScore] = {}
        self._sessions, self._mean, self._squares = 0, 0.0, 0.0
        """Of all rewards, by Welford's algorithm; `_squares` adds up squared distances from the mean."""

    def add(self, version: int, reward: float) -> None:
        _, sessions, mean = self._known.get(version, VersionScore(version, 0, 0.0))
        self._known[version] = VersionScore(version, sessions + 1, mean + (reward - mean) / (sessions + 1))
        self._sessions += 1
        before = self._mean
        self._mean += (reward - before) / self._sessions
        self._squares += (reward - before) * (reward - self._mean)

    def best(self, servable: Collection[int]) -> VersionScore | None:
        """The one with the highest mean less its doubt; of equals the newest. None where none is known.
        Versions that can be served no more are forgotten."""
        self._known = {version: each for version, each in self._known.items() if version in servable}
        spread = sqrt(self._squares / self._sessions) if self._sessions else 0.0
        return max(
            self._known.values(),
            key=lambda each: (each.reward - CAUTION * spread / sqrt(each.sessions), each.version),
            default=None,
        )
