"""The figures of one run, as they lie in results/data."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

WINDOW = 512
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


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """`variant` is `trl` for a run of TRL."""

    experiment: str
    variant: str
    seed: int
    before: Judged
    after: Judged
    to_target: Spent | None
    """Until the mean reward of the last 512 episodes reached the target; None if it did not."""
    spent: Spent
    """In the whole training."""
    versions: int
    """Optimizer steps."""
    left_out: int = 0
    """How often a task was left out because it taught nothing."""
    verdicts: dict[str, int] = {}
    """Sessions by verdict, those of the evaluations included."""
    curve: list[tuple[int, float]]
    """Episodes, and the mean reward of the last 512."""
    load: float
    """Load average of the machine at the end."""


def reached(rewards: Sequence[float], spent: Sequence[Spent], target: float) -> Spent | None:
    """What was spent when the mean reward of the last 512 episodes first reached the target; None if it never
    did. `rewards` and `spent` have an entry for each episode, in the order in which they ended."""
    total = 0.0
    for place, reward in enumerate(rewards):
        total += reward - (rewards[place - WINDOW] if place >= WINDOW else 0.0)
        if place + 1 >= WINDOW and total / WINDOW >= target - 1e-9:
            return spent[place]
    return None


def curve_of(rewards: Sequence[float]) -> list[tuple[int, float]]:
    """Episodes, and the mean reward of the last 512 of them."""
    every = max(1, len(rewards) // CURVE_POINTS)
    places = [*range(WINDOW, len(rewards), every), len(rewards)] if len(rewards) >= WINDOW else []
    return [(place, round(sum(rewards[place - WINDOW : place]) / WINDOW, 4)) for place in places]
