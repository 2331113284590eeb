"""What a run's figures are made of: its curve, and what it took to reach a target."""

import msgspec
import pytest

from results.figures import WINDOW, CurvePoint, Judged, Spent, TrialResult, curve_of


def result_of(rewards: list[float]) -> TrialResult:
    spent = [Spent(number, number / 10, number / 5) for number in range(1, len(rewards) + 1)]
    judged = Judged(0.0, 0.0, 0.0)
    return TrialResult(
        experiment="countdown",
        variant="async",
        seed=0,
        before=judged,
        after=judged,
        versions=1,
        curve=curve_of(rewards, spent),
        load=1.0,
    )


def test_a_target_is_reached_by_the_last_episodes_alone() -> None:
    result = result_of([0.0] * 1000 + [1.0] * 1000)
    found = result.reached(0.5)
    assert found is not None
    apart = found.episodes - (1000 + WINDOW // 2)
    assert 0 <= apart < 20, "a curve has a point for each hundredth of the episodes"
    assert (found.seconds, found.cpu_s) == (found.episodes / 10, found.episodes / 5)
    assert result.reached(1.1) is None


def test_a_curve_begins_with_a_full_window_and_ends_with_the_last_episodes() -> None:
    result = result_of([0.0] * 1000 + [1.0] * 1000)
    assert result.curve[0] == CurvePoint(0.0, Spent(WINDOW, WINDOW / 10, WINDOW / 5))
    assert result.curve[-1] == CurvePoint(1.0, result.spent)
    assert result.spent.episodes == 2000
    assert result_of([1.0] * WINDOW).reached(1.0) == Spent(WINDOW, WINDOW / 10, WINDOW / 5)
    with pytest.raises(ValueError, match="needs 256 episodes"):
        curve_of([1.0] * (WINDOW - 1), [])


def test_figures_are_read_as_they_were_written() -> None:
    result = result_of([0.5] * 300)
    assert msgspec.json.decode(msgspec.json.encode(result), type=TrialResult) == result
