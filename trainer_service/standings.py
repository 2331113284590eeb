"""How versions do in training: by the rewards of the sessions that they sampled."""

from collections.abc import Collection
from math import sqrt
from typing import NamedTuple

VERSIONS_KEPT = 1000
CAUTION = 2.0
"""Standard errors by which a mean counts for less: few lucky sessions are no proof."""


class Standing(NamedTuple):
    """What is known of one version."""

    version: int
    sessions: int
    reward: float
    """Mean."""

    def __str__(self) -> str:
        return (
            f"version {self.version} is served, which did best: {self.reward:.3g} in {self.sessions} sessions"
        )


class Standings:
    """The rewards of this process's time. A version that nobody sampled has none, and is never the best."""

    def __init__(self) -> None:
        self._known: dict[int, Standing] = {}
        self._sessions, self._mean, self._squares = 0, 0.0, 0.0
        """Of all rewards, by Welford's algorithm; `_squares` adds up squared distances from the mean."""

    def add(self, version: int, reward: float) -> None:
        _, sessions, mean = self._known.get(version, Standing(version, 0, 0.0))
        self._known[version] = Standing(version, sessions + 1, mean + (reward - mean) / (sessions + 1))
        for oldest in sorted(self._known)[:-VERSIONS_KEPT]:
            del self._known[oldest]
        self._sessions += 1
        before = self._mean
        self._mean += (reward - before) / self._sessions
        self._squares += (reward - before) * (reward - self._mean)

    def best(self, among: Collection[int]) -> Standing | None:
        """The one with the highest mean less its doubt; of equals the newest. None where none is known."""
        spread = sqrt(self._squares / self._sessions) if self._sessions else 0.0
        return max(
            (self._known[version] for version in among if version in self._known),
            key=lambda each: (each.reward - CAUTION * spread / sqrt(each.sessions), each.version),
            default=None,
        )
