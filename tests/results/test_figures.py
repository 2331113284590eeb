"""What a run's figures are made of: curves, and what it took to reach a target."""

from results.figures import WINDOW, Spent, curve_of, reached


def spent_of(count: int) -> list[Spent]:
    return [Spent(number, number / 10, number / 5) for number in range(1, count + 1)]


def test_a_target_is_reached_by_the_last_episodes_alone() -> None:
    rewards = [0.0] * 1000 + [1.0] * 1000
    found = reached(rewards, spent_of(2000), target=0.5)
    assert found == Spent(1000 + WINDOW // 2, (1000 + WINDOW // 2) / 10, (1000 + WINDOW // 2) / 5)


def test_a_target_is_not_reached_before_the_window_is_full() -> None:
    assert reached([1.0] * (WINDOW - 1), spent_of(WINDOW - 1), target=0.5) is None
    assert reached([1.0] * WINDOW, spent_of(WINDOW), target=0.5) == spent_of(WINDOW)[-1]


def test_a_target_that_was_never_reached_is_none() -> None:
    assert reached([0.1] * 2000, spent_of(2000), target=0.11) is None


def test_a_curve_ends_with_the_last_episodes() -> None:
    curve = curve_of([0.0] * 1000 + [1.0] * 1000)
    assert curve[0] == (WINDOW, 0.0)
    assert curve[-1] == (2000, 1.0)
    assert curve_of([1.0] * (WINDOW - 1)) == []
