"""Which version did best, by the rewards of the sessions that it served."""

from random import Random

import msgspec
import pytest

from tests.support.tolerances import FLOAT64, ulps
from trainer_service.groups.version_scores import ScoreState, VersionScores


def version_scores(**rewards: list[float]) -> VersionScores:
    """Scores with these rewards. The name `v1` stands for version 1."""
    made = VersionScores()
    for name, values in rewards.items():
        for value in values:
            made.add(int(name[1:]), value)
    return made


def best(known: VersionScores, servable: list[int]) -> tuple[int, int, float] | None:
    """The best version, its sessions and its rounded mean reward."""
    found = known.best(servable)
    return None if found is None else (found.version, found.sessions, round(found.reward, 9))


def test_the_best_version_has_a_high_mean_over_enough_sessions() -> None:
    known = version_scores(v1=[0.0, 1.0] * 50, v2=[1.0] * 90 + [0.0] * 10, v3=[1.0] * 4, v4=[0.0] * 100)
    assert best(known, [1, 2, 3, 4, 5]) == (2, 100, 0.9)
    assert best(known, [1, 3, 4, 5]) == (3, 4, 1.0), "fewer sessions, but a much higher mean"
    assert best(known, [1, 4]) == (1, 100, 0.5)
    assert known.best([5]) is None
    assert VersionScores().best([1]) is None


def test_of_equal_versions_the_newest_is_the_best() -> None:
    assert best(version_scores(v1=[1.0] * 8, v2=[1.0] * 8), [2, 1]) == (2, 8, 1.0)


def test_means_are_right_far_from_zero() -> None:
    random = Random(0)
    values = [1e6 + random.random() for _ in range(1000)]
    found = version_scores(v1=values).best([1])
    assert found is not None
    assert found.reward == pytest.approx(sum(values) / 1000, rel=ulps(1000, unit=FLOAT64))
    assert best(version_scores(v1=values, v2=[1e6 + 0.9] * 500), [1, 2]) == (2, 500, 1e6 + 0.9)


def test_versions_that_cannot_be_served_are_forgotten() -> None:
    known = version_scores(v1=[1.0], v2=[0.5], v3=[0.1])
    known.keep([2, 3])
    assert best(known, [1, 2, 3]) == (2, 1, 0.5)
    known.add(1, 0.7)
    assert best(known, [1, 3]) == (1, 1, 0.7)


def test_evaluations_of_hard_tasks_make_no_version_look_worse() -> None:
    """Each session counts by its difference from the mean reward of its kind."""
    known = version_scores(v1=[0.8] * 8, v2=[0.9] * 8)
    for version, reward in ((2, 0.3), (3, 0.1)):
        for _ in range(8):
            known.add(version, reward, "evaluation")
    assert best(known, [1, 2, 3]) == (2, 16, 0.6)
    known = version_scores(v1=[0.8] * 8, v2=[0.8] * 8)
    for version, reward in ((1, 0.1), (2, 0.3)):
        known.add(version, reward, "evaluation")
    assert best(known, [1, 2]) == (2, 9, round((0.8 * 8 + 0.3) / 9, 9))


def test_scores_continue_after_a_restart() -> None:
    known, again = version_scores(v1=[1.0, 0.0], v2=[0.5]), VersionScores()
    again.resume(msgspec.json.decode(msgspec.json.encode(known.state), type=ScoreState))
    for each in (known, again):
        each.add(2, 1.0)
    assert again.best([1, 2]) == known.best([1, 2])
