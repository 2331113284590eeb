"""Which version did best, by the rewards of those that it served."""

from random import Random

import pytest

from trainer_service.standings import VERSIONS_KEPT, Standing, Standings


def standings(**rewards: list[float]) -> Standings:
    """By version, as `v1`."""
    made = Standings()
    for name, values in rewards.items():
        for value in values:
            made.add(int(name[1:]), value)
    return made


def test_the_best_is_the_highest_mean_that_enough_sessions_prove() -> None:
    known = standings(v1=[0.0, 1.0] * 50, v2=[1.0] * 90 + [0.0] * 10, v3=[1.0] * 4, v4=[0.0] * 100)
    assert known.best([1, 2, 3, 4, 5]) == Standing(2, 100, pytest.approx(0.9))
    assert known.best([1, 3, 4, 5]) == Standing(3, 4, 1.0), "less proof, but nothing else comes near"
    assert known.best([1, 4]) == Standing(1, 100, pytest.approx(0.5))
    assert known.best([5]) is None
    assert Standings().best([1]) is None


def test_of_equals_the_newest_is_the_best() -> None:
    assert standings(v1=[1.0] * 8, v2=[1.0] * 8).best([2, 1]) == Standing(2, 8, 1.0)


def test_means_are_right_far_from_zero() -> None:
    random = Random(0)
    values = [1e6 + random.random() for _ in range(1000)]
    best = standings(v1=values).best([1])
    assert best is not None
    assert best.reward == pytest.approx(sum(values) / 1000, rel=1e-12)
    assert standings(v1=values, v2=[1e6 + 0.9] * 500).best([1, 2]) == Standing(
        2, 500, pytest.approx(1e6 + 0.9)
    )


def test_the_oldest_are_forgotten() -> None:
    known = Standings()
    for version in range(VERSIONS_KEPT + 1):
        known.add(version, 1.0)
    assert known.best([0]) is None
    assert known.best([1]) is not None
