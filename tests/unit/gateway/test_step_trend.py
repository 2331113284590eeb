"""How long a step of the trainer takes, where it waits for rollouts most of the time."""

from gateway.callers.caller_limits import StepTrend


def test_only_the_time_in_which_the_trainer_works_counts() -> None:
    trend = StepTrend()
    for cycle in range(4):
        began = 32.0 * cycle
        trend.note(began, cycle, busy=False)  # it has waited 30 s for rollouts
        trend.note(began + 1, cycle, busy=True)
        trend.note(began + 2, cycle + 1, busy=True)
    assert trend.seconds_to_move(1) == 2.0
    assert trend.seconds_to_move(3) == 6.0


def test_a_busy_trainer_has_the_pace_of_its_versions() -> None:
    trend = StepTrend()
    for second in range(61):
        trend.note(float(second), second // 10, busy=True)
    assert trend.seconds_to_move(1) == 10.0


def test_without_a_step_there_is_no_estimate() -> None:
    trend = StepTrend()
    assert trend.seconds_to_move(1) is None
    for second in range(10):
        trend.note(float(second), 3, busy=True)
    assert trend.seconds_to_move(1) is None
