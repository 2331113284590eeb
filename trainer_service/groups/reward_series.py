"""Series of the mean rewards of groups, and whether they have fallen from their best."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from statistics import fmean
from typing import Self

import msgspec

NOISE = 5.0
"""A fall of the mean reward raises an alarm only if it is greater than this many standard errors."""
VALUES_KEPT = 2**16
"""All series together keep about as many rewards, and at least FEWEST_KEPT series."""
FEWEST_KEPT = 32


class Spread(msgspec.Struct, frozen=True):
    """The number, mean and sum of squared distances from the mean of some rewards, by Welford's algorithm."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Self:
        mean = fmean(rewards)
        return cls(len(rewards), mean, sum((reward - mean) ** 2 for reward in rewards))

    def plus(self, reward: float) -> "Spread":
        count = self.count + 1
        mean = self.mean + (reward - self.mean) / count
        return Spread(count, mean, self.squares + (reward - self.mean) * (reward - mean))

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return sqrt(self.squares / max(1, self.count - 1) / max(1, self.count))


def has_fallen(before: Spread, now: Spread, share: float) -> bool:
    """Whether the mean has fallen by more than this share of it, and more than noise explains."""
    fall = before.mean - now.mean
    return fall > share * abs(before.mean) and fall > NOISE * sqrt(before.error**2 + now.error**2)


class RewardSeries(msgspec.Struct):
    """The last groups of one task, or of all tasks of a source."""

    rewards: list[float] = []
    usual: list[float | None] = []
    """For each of them, the mean reward of earlier groups of the same task. None for a task's first group,
    and in the series of one task."""
    best: Spread | None = None
    """The best mean of as many consecutive groups as are compared, before the last ones."""
    tasks: int = 1
    """How many tasks it has."""

    def add(self, reward: float, groups: int, usual: float | None = None) -> None:
        """Count a group, where `groups` groups are compared with as many."""
        self.rewards.append(reward)
        self.usual.append(usual)
        del self.rewards[: -2 * groups], self.usual[: -2 * groups]
        if len(self.rewards) == 2 * groups:
            before = Spread.of(self.rewards[:groups])
            self.best = before if self.best is None or before.mean > self.best.mean else self.best

    def fall(self, groups: int, share: float) -> tuple[Spread, Spread] | None:
        """The best mean and the present one, if it has fallen from there by more than this share."""
        if self.best is None:
            return None
        now = Spread.of(self.rewards[-groups:])
        fell = has_fallen(self.best, now, share) and not self._other_tasks_explain(groups)
        return (self.best, now) if fell else None

    def _other_tasks_explain(self, groups: int) -> bool:
        """Whether each task does as it did: then the last groups only are of harder tasks."""
        last = zip(self.usual[-groups:], self.rewards[-groups:], strict=True)
        falls = [usual - reward for usual, reward in last if usual is not None]
        if 2 * len(falls) < groups:  # most of the tasks are new
            return False
        fall = Spread.of(falls)
        return fall.mean <= NOISE * fall.error

    def copied(self) -> "RewardSeries":
        return RewardSeries(list(self.rewards), list(self.usual), self.best, self.tasks)


class KeptSeries:
    """So many series by name, those that were used last. One that has a best is not lost to those that have
    none yet, however many they are."""

    def __init__(self, groups: int, kept: Mapping[str, RewardSeries]) -> None:
        self._most = max(FEWEST_KEPT, VALUES_KEPT // (4 * groups))
        self._young: OrderedDict[str, RewardSeries] = OrderedDict()
        self._judged: OrderedDict[str, RewardSeries] = OrderedDict()
        for name, series in kept.items():
            self.put(name, series)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._judged, *self._young))

    def get(self, name: str) -> RewardSeries | None:
        return self._young.get(name) or self._judged.get(name)

    def put(self, name: str, series: RewardSeries) -> None:
        self.forget(name)
        kept = self._young if series.best is None else self._judged
        kept[name] = series
        if len(kept) > self._most:
            kept.popitem(last=False)

    def forget(self, name: str) -> None:
        self._young.pop(name, None)
        self._judged.pop(name, None)

    @property
    def state(self) -> dict[str, RewardSeries]:
        return {name: each.copied() for kept in (self._judged, self._young) for name, each in kept.items()}
