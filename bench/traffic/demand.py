"""The groups that agents want to sample in a day: how many, of which tasks, and how long they take."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
STEP_S = 480.0
GROUPS_PER_STEP, GROUP_SIZE = 8, 2
TASKS = 20
SHORTEST_S, LONGEST_S, SPREAD = 96.0, 1920.0, 0.5
"""Median lengths of the sessions of the shortest and of the longest task; standard deviation of the log."""


@dataclass(frozen=True)
class Demand:
    """A group that somebody wants to sample."""

    number: int
    task: int
    at_s: float
    lengths_s: tuple[float, ...]
    """How long each of its sessions takes."""


def demands(load: float, hours: float, swing: float, seed: int) -> Iterator[Demand]:
    """Groups at `load` times the capacity in the mean, in the order in which they come."""
    draw = random.Random(seed)
    lengths = [SHORTEST_S * (LONGEST_S / SHORTEST_S) ** (task / (TASKS - 1)) for task in range(TASKS)]
    draw.shuffle(lengths)
    popularity = [1 / (1 + task) for task in range(TASKS)]
    most = load * GROUPS_PER_STEP / STEP_S * (1 + swing)
    at_s, number = 0.0, 0
    while (at_s := at_s + draw.expovariate(most)) < hours * HOUR_S:
        if draw.random() * (1 + swing) > 1 + swing * math.sin(2 * math.pi * at_s / DAY_S):
            continue  # thins the arrivals to the rate at this time of the day
        (task,) = draw.choices(range(TASKS), popularity)
        taken = tuple(draw.lognormvariate(math.log(lengths[task]), SPREAD) for _ in range(GROUP_SIZE))
        yield Demand(number, task, at_s, taken)
        number += 1
