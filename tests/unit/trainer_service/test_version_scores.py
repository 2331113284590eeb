"""Which version did best, by the rewards of the sessions that it served."""

from random import Random

import msgspec
import pytest

from tests.support.tolerances import FLOAT64, ulps
from trainer_service.groups.group_rewards import ScoreState, VersionScores


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


def tasks_of(known: VersionScores, version: int, **rewards: float) -> None:
    """Eight sessions of each of these tasks, sampled by the version."""
    for name, reward in rewards.items():
        for _ in range(8):
            known.add(version, reward, task_id=name.replace("_", ":"))


def test_versions_are_compared_by_the_tasks_that_both_have_sampled() -> None:
    known = VersionScores()
    tasks_of(known, 1, easy_1=0.5)
    tasks_of(known, 2, easy_1=0.9)
    tasks_of(known, 3, hard_1=0.1)
    tasks_of(known, 4, hard_1=0.3)
    tasks_of(known, 5, hard_1=0.2)
    assert best(known, [1, 2, 3, 4, 5]) == (4, 8, 0.3), "version 2 has never met the newer task"
    assert best(known, [1, 2]) == (2, 8, 0.9)
    tasks_of(known, 5, easy_1=0.9)
    assert best(known, [2, 3, 5]) == (5, 16, 0.55), "as good as 2 at one, better than 3 at the other"
    again = VersionScores()
    again.resume(msgspec.json.decode(msgspec.json.encode(known.state), type=ScoreState))
    for each in (known, again):
        found = each.best([1, 2, 3, 4, 5], "easy:1", "easy")
        assert found is not None
        assert (found.version, found.sessions, round(found.reward, 9)) == (5, 8, 0.9)
        hard = each.best([1, 3, 4, 5], None, "hard")
        assert hard is not None
        assert (hard.version, hard.sessions, round(hard.reward, 9)) == (4, 8, 0.3)
        other = each.best([2, 3], None, "hard")
        assert other is not None
        assert other.version == 2, "3 is known to be bad at the task, and 2 is not"


def test_a_mixture_with_more_easy_tasks_makes_no_version_look_better() -> None:
    known = VersionScores()
    for number in range(20):  # the last twelve are scored together
        for version, reward in ((1, 0.9), (2, 0.95)):
            tasks = range(number % 2, 20, 2) if version == 1 else range(20)
            for task in tasks:
                known.add(version, reward * (task % 2), task_id=f"maths:{task}")
    assert best(known, [1, 2]) == (2, 400, 0.475)


def test_a_million_sources_take_bounded_memory() -> None:
    known = VersionScores()
    for at in range(10_000):
        known.add(at % 3, 0.5, task_id=f"user{at}z:task:1")
    assert len(msgspec.json.encode(known.state)) < 100_000
    assert best(known, [0, 1, 2]) is not None


def test_scores_continue_after_a_restart() -> None:
    """Those of a release that does not tell tasks apart count for sessions without a task."""
    known, again = version_scores(v1=[1.0, 0.0], v2=[0.5]), VersionScores()
    again.resume(msgspec.json.decode(msgspec.json.encode(known.state), type=ScoreState))
    for each in (known, again):
        each.add(2, 1.0)
    assert again.best([1, 2]) == known.best([1, 2])
