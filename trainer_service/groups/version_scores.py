"""Scores each version by the rewards of the sessions that it sampled."""

from collections.abc import Collection
from math import sqrt
from typing import Literal, NamedTuple

import msgspec

STANDARD_ERRORS = 2.0
"""This many standard errors are subtracted from a version's mean reward, so that a few lucky sessions do not
make it the best."""

Kind = Literal["training", "evaluation"]
"""Training and evaluation sessions may have tasks of unequal difficulty."""


class VersionScore(NamedTuple):
    """The rewards of one version."""

    version: int
    sessions: int
    reward: float
    """The mean reward of its sessions."""


class Spread(msgspec.Struct, frozen=True):
    """The number, mean and sum of squared distances from the mean of some rewards, by Welford's algorithm."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def plus(self, reward: float) -> "Spread":
        count = self.count + 1
        mean = self.mean + (reward - self.mean) / count
        return Spread(count, mean, self.squares + (reward - self.mean) * (reward - mean))


class ScoreState(msgspec.Struct, frozen=True):
    """All scores, as a checkpoint stores them."""

    versions: dict[int, dict[Kind, Spread]] = {}
    overall: dict[Kind, Spread] = {}
    """Over the rewards of all versions."""


class VersionScores:
    """A version that sampled nothing is never the best."""

    def __init__(self) -> None:
        self._known: dict[int, dict[Kind, Spread]] = {}
        self._overall: dict[Kind, Spread] = {}

    def resume(self, state: ScoreState) -> None:
        """Continue with the scores that a checkpoint stored."""
        self._known = {version: dict(kinds) for version, kinds in state.versions.items()}
        self._overall = dict(state.overall)

    @property
    def state(self) -> ScoreState:
        return ScoreState({version: dict(each) for version, each in self._known.items()}, dict(self._overall))

    def add(self, version: int, reward: float, kind: Kind = "training") -> None:
        kinds = self._known.setdefault(version, {})
        kinds[kind] = kinds.get(kind, Spread()).plus(reward)
        self._overall[kind] = self._overall.get(kind, Spread()).plus(reward)

    def knows(self, version: int) -> bool:
        return version in self._known

    def best(self, among: Collection[int]) -> VersionScore | None:
        """The version whose sessions were best compared with all sessions of their kind: by the mean
        difference from the kind's mean reward, minus STANDARD_ERRORS standard errors. Among equal ones, the
        newest; None if none of them has a session."""
        known = [version for version in among if version in self._known]
        found = max(known, key=lambda version: (self._advantage(version), version), default=None)
        return None if found is None else self._score(found)

    def keep(self, versions: Collection[int]) -> None:
        """Forget all other versions."""
        self._known = {version: each for version, each in self._known.items() if version in versions}

    def _advantage(self, version: int) -> float:
        kinds = self._known[version]
        sessions = sum(each.count for each in kinds.values())
        total = sum(each.count * (each.mean - self._overall[kind].mean) for kind, each in kinds.items())
        overall = self._overall.values()
        spread = sqrt(sum(each.squares for each in overall) / sum(each.count for each in overall))
        return total / sessions - STANDARD_ERRORS * spread / sqrt(sessions)

    def _score(self, version: int) -> VersionScore:
        kinds = self._known[version].values()
        sessions = sum(each.count for each in kinds)
        return VersionScore(version, sessions, sum(each.count * each.mean for each in kinds) / sessions)
