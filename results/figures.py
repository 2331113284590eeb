"""The figures of one run, as they lie in results/data."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

WINDOW = 256
"""A curve has the mean reward of the last so many episodes."""
CURVE_POINTS = 100


class Judged(msgspec.Struct, frozen=True):
    """The mean reward of an evaluation, with its 95 % interval."""

    mean: float
    low: float
    high: float


class Spent(NamedTuple):
    """What a run had spent when an episode ended. `cpu_s` counts all services, the engine, the runner and its
    hosts."""

    episodes: int
    seconds: float
    cpu_s: float


class CurvePoint(NamedTuple):
    """The mean reward of the last 256 episodes, and what they and all before them took."""

    reward: float
    spent: Spent


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """`variant` is `trl` for a run of TRL."""

    experiment: str
    variant: str
    seed: int
    before: Judged
    after: Judged
    versions: int
    """Optimizer steps."""
    left_out: int = 0
    """How often a task was left out because it taught nothing."""
    verdicts: dict[str, int] = {}
    """Sessions by verdict, those of the evaluations included."""
    curve: list[CurvePoint]
    load: float
    """Load average of the machine at the end."""

    @property
    def spent(self) -> Spent:
        """In the whole training."""
        return self.curve[-1].spent

    def reached(self, target: float) -> Spent | None:
        """What was spent when the mean reward of the last 256 episodes first reached the target; None if it
        never did."""
        return next((point.spent for point in self.curve if point.reward >= target), None)


def curve_of(rewards: Sequence[float], spent: Sequence[Spent]) -> list[CurvePoint]:
    """About a hundred points. Both have an entry for each episode, in the order in which they ended. Raises
    ValueError if there are less than 256."""
    count = len(rewards)
    if count < WINDOW:
        raise ValueError(f"a curve needs {WINDOW} episodes, not {count}")
    places = [*range(WINDOW, count, max(1, count // CURVE_POINTS)), count]
    return [
        CurvePoint(round(fmean(rewards[place - WINDOW : place]), 4), spent[place - 1]) for place in places
    ]
