"""The simulation of a day's traffic: what follows from arithmetic, whatever the numbers."""

from statistics import fmean

import pytest

from bench.traffic import (
    CHOICES,
    GROUP_SIZE,
    GROUPS_PER_STEP,
    HOUR_S,
    MAX_STALENESS,
    STEP_S,
    Day,
    Demand,
    Outcomes,
    demands,
    jain,
    main,
)

HOURS = 2.0
STEPS = HOURS * HOUR_S / STEP_S


@pytest.fixture(scope="module")
def at_twice_the_capacity() -> dict[str, Outcomes]:
    """The demand does not swing, so that it is always twice the capacity."""
    return {choice.name: Day(choice).run(2.0, HOURS, 0.0, seed=1) for choice in CHOICES}


def arrived(load: float) -> list[Demand]:
    return list(demands(load, HOURS, 0.0, seed=1))


def longer_than(steps: int, load: float) -> float:
    """The share of the demand whose sessions take longer than that many steps."""
    groups = arrived(load)
    return sum(max(group.lengths_s) > steps * STEP_S for group in groups) / len(groups)


def test_at_twice_the_capacity_no_more_than_the_capacity_is_trained(
    at_twice_the_capacity: dict[str, Outcomes],
) -> None:
    capacity = GROUPS_PER_STEP * STEPS / len(arrived(2.0))
    # Before the first step, the first sessions have to end; the last step's sessions may still run.
    startup = 2 * 5 / STEPS
    for name, found in at_twice_the_capacity.items():
        assert capacity - startup < found.trained <= capacity + 1 / STEPS, name
        assert found.trained + found.refused + found.lost + found.unfinished == pytest.approx(1, abs=1e-9)
        assert found.staleness[-1] <= MAX_STALENESS, name


def test_the_newest_are_younger_than_the_oldest_and_a_replay_share_lies_between(
    at_twice_the_capacity: dict[str, Outcomes],
) -> None:
    mean = {name: fmean(found.staleness) for name, found in at_twice_the_capacity.items()}
    assert mean["newest"] < mean["newest, replay_share 0.25"] < mean["oldest"]
    assert mean["bounded, 16 groups"] < mean["oldest"]


def test_a_bound_limits_what_waits_and_a_limit_at_the_gateway_what_is_lost(
    at_twice_the_capacity: dict[str, Outcomes],
) -> None:
    bounded, throttled = (at_twice_the_capacity[CHOICES[place].name] for place in (3, 4))
    # What is selected from, before what is beyond the bound ends: the bound, and what arrived during a step.
    # Arrivals of a step are Poisson around twice its groups; they stay within five deviations.
    in_a_step = 2 * GROUPS_PER_STEP
    assert bounded.most_waiting <= GROUP_SIZE * (2 * GROUPS_PER_STEP + in_a_step + 5 * in_a_step**0.5)
    # An admitted session is one of at most five steps' rollouts, so it is trained five versions after it has
    # begun, unless it takes too long itself.
    assert throttled.lost <= longer_than(MAX_STALENESS - 5, 2.0) < bounded.lost
    assert throttled.refused == pytest.approx(0.5, abs=longer_than(MAX_STALENESS - 5, 2.0))


def test_at_half_the_capacity_all_settings_are_alike() -> None:
    for choice in CHOICES:
        found = Day(choice).run(0.5, HOURS, 0.0, seed=1)
        assert found.lost <= longer_than(MAX_STALENESS - 2, 0.5)
        assert found.refused == 0


def test_jains_index_is_one_for_equal_shares_and_one_of_n_for_a_single_one() -> None:
    assert jain([0.3, 0.3, 0.3]) == pytest.approx(1, rel=1e-12)
    assert jain([0.0, 0.0, 0.5, 0.0]) == pytest.approx(1 / 4, rel=1e-12)


def test_the_table_has_a_line_for_each_load_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--loads", "1", "2", "--hours", "0.5"])
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * len(CHOICES)
