"""What an evaluation may claim, against closed forms and simulation."""

from itertools import combinations
from random import Random

import pytest

from environments.results.intervals import mean_interval, paired_difference, pass_at_k, wilson


@pytest.mark.parametrize(("count", "passed", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 6), (4, 3, 2)])
def test_pass_at_k_is_the_share_of_samples_of_k_with_one_that_passes(count: int, passed: int, k: int) -> None:
    chosen = list(combinations([True] * passed + [False] * (count - passed), k))
    assert pass_at_k(count, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_pass_at_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 samples"):
        pass_at_k(2, 1, 3)


def test_wilson_is_the_root_of_its_equation() -> None:
    for passed, count in ((0, 5), (3, 10), (10, 10), (1, 1000)):
        for bound in wilson(passed, count):
            variance = bound * (1 - bound) / count
            assert (bound - passed / count) ** 2 == pytest.approx(1.959964**2 * variance, abs=1e-9)


def test_the_interval_of_tasks_covers_as_often_as_it_says() -> None:
    """Of 2,000 intervals at 95 %, between 1,861 and 1,939 cover: 4 standard deviations of a binomial."""
    random, covered = Random(0), 0
    for _ in range(2000):
        levels = [random.gauss(0.3, 1.0) for _ in range(200)]
        rewards = {str(n): [random.gauss(level, 0.5) for _ in range(4)] for n, level in enumerate(levels)}
        _, low, high = mean_interval(rewards)
        covered += low <= 0.3 <= high
    assert 1861 <= covered <= 1939


def test_a_comparison_is_paired_by_task() -> None:
    one = {str(n): [float(n)] for n in range(50)}
    other = {str(n): [n + 0.5] for n in range(40)}
    mean, low, high, count = paired_difference(one, other)
    assert (mean, low, high, count) == (0.5, 0.5, 0.5, 40)
    with pytest.raises(ValueError, match="no task in common"):
        paired_difference(one, {"x": [1.0]})
