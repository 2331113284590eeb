"""What rewards say of a model: their mean with its 95 % interval, rates, pass@k, how two models differ."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""


def mean_interval(rewards_by_task: Mapping[str, Sequence[float]]) -> tuple[float, float, float]:
    """The mean over tasks of the mean reward of each, and its 95 % interval.

    Samples of one task are not independent, so the standard error is that of the tasks' means (Miller 2024,
    "Adding Error Bars to Evals", section 2.2). With one task alone the interval is that of its samples.
    """
    means = [fmean(rewards) for rewards in rewards_by_task.values()]
    values = means if len(means) > 1 else list(next(iter(rewards_by_task.values()), ()))
    if not values:
        raise ValueError("there are no rewards")
    mean = fmean(values)
    half = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean, mean - half, mean + half


def wilson(passed: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate (Wilson 1927): it stays within 0 and 1, and is not empty at their
    ends."""
    if count == 0:
        return 0.0, 1.0
    rate, square = passed / count, Z * Z / count
    middle = (rate + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(rate * (1 - rate) / count + square / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def pass_at_k(count: int, passed: int, k: int) -> float:
    """The probability that one of k samples passes, from `count` samples of which `passed` did.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) of Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", equation 1. Raises ValueError if k > n.
    """
    if not 0 < k <= count:
        raise ValueError(f"pass@{k} needs at least {k} samples, and there are {count}")
    return 1.0 - math.comb(count - passed, k) / math.comb(count, k)


def paired_difference(
    one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]
) -> tuple[float, float, float, int]:
    """The mean of `other` minus `one` over the tasks of both, its 95 % interval, and how many tasks there
    are."""
    common = sorted(one.keys() & other.keys())
    if not common:
        raise ValueError("the two runs have no task in common")
    differences = {task: [fmean(other[task]) - fmean(one[task])] for task in common}
    return *mean_interval(differences), len(common)


def judged(summary: dict[str, Any]) -> str:
    """The mean reward of an evaluation with its interval, as a text."""
    if (reward := summary.get("reward")) is None:
        return "no episode was judged"
    return f"{reward['mean']:.4f} [{reward['low']:.4f}, {reward['high']:.4f}]"
