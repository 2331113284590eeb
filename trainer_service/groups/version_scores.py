"""Scores each version by the rewards of the training sessions that it sampled."""

from collections.abc import Collection
from math import sqrt
from typing import NamedTuple

STANDARD_ERRORS = 2.0
"""This many standard errors are subtracted from a version's mean reward, so that a few lucky sessions do not
make it the best."""


class VersionScore(NamedTuple):
    """The rewards of one version."""

    version: int
    sessions: int
    reward: float
    """The mean reward of its sessions."""


class VersionScores:
    """The rewards since this process started. A version that sampled nothing is never the best."""

    def __init__(self) -> None:
        self._known: dict[int, VersionScore] = {}
        # Over all rewards, by Welford's algorithm: `_squares` is the sum of squared distances from the mean.
        self._sessions, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, version: int, reward: float) -> None:
        _, sessions, mean = self._known.get(version, VersionScore(version, 0, 0.0))
        self._known[version] = VersionScore(version, sessions + 1, mean + (reward - mean) / (sessions + 1))
        self._sessions += 1
        before = self._mean
        self._mean += (reward - before) / self._sessions
        self._squares += (reward - before) * (reward - self._mean)

    def best(self, servable: Collection[int]) -> VersionScore | None:
        """The version whose mean reward, minus STANDARD_ERRORS standard errors, is the highest. Among equal
        ones, the newest; None if no servable version has a session. Forgets the versions that are not
        `servable`."""
        self._known = {version: each for version, each in self._known.items() if version in servable}
        spread = sqrt(self._squares / self._sessions) if self._sessions else 0.0
        return max(
            self._known.values(),
            key=lambda each: (each.reward - STANDARD_ERRORS * spread / sqrt(each.sessions), each.version),
            default=None,
        )
