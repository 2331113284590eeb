"""Groups: how many members are enough, how old they are, how one without an advantage counts, and traces."""

import pytest

from rollout_queue.contract.records import Span, Verdict
from tests.support.queue.records import turn
from tests.support.trainer_service.made_rows import rows_of
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group
from trainer_service.groups.episode import Member, Rules
from trainer_service.groups.screening import ScreenedGroup, is_too_old
from trainer_service.groups.tally import Tally
from trainer_service.rows.rows import PlannedRow
from trainer_service.step.group_trainer import traces_of


@pytest.mark.parametrize(
    ("share", "size", "needed"),
    [(0.0, 8, 8), (0.5, 8, 4), (0.3, 8, 6), (0.29, 100, 71), (0.9, 8, 2), (0.9, 1, 1), (0.1, 4, 4)],
)
def test_over_sampling_ends_a_group_early_but_not_below_its_smallest_size(
    share: float, size: int, needed: int
) -> None:
    """0.29 · 100 is 28.999… in floating point."""
    rules = Rules(vocab_size=10, train_truncated=False, group_wait_s=1.0, over_sampling=share)
    assert rules.needed(size) == needed


def member(session_id: str, *versions: int) -> Member:
    spans = tuple(Span(version, at, at + 1) for at, version in enumerate(versions))
    sampled = turn("t", session_id, versions=spans)
    return Member(session_id, (), (sampled,), 1.0, None)


@pytest.mark.parametrize(("stale", "too_old_at"), [("mask", 8), ("drop", 5)])
def test_a_group_is_as_old_as_its_setting_says(stale: str, too_old_at: int) -> None:
    group = Group("g", 2, (member("a", 1, 5), member("b", 2, 3)))
    algorithm = AlgorithmSettings.model_validate({"stale": stale, "max_staleness": 2})
    assert [is_too_old(group, version, algorithm) for version in (too_old_at - 1, too_old_at)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(("members", "counted"), [(1, "group/singleton"), (2, "group/zero_var")])
def test_a_group_without_an_advantage_counts_once(members: int, counted: str) -> None:
    silent = [Member(f"s{number}", (), (turn(),), 1.0, None) for number in range(members)]
    verdict = Verdict(code="zero_advantage", detail="all rewards are equal")
    screened = ScreenedGroup(
        Group("g", members, tuple(silent)), (), (), 0, tuple((each, verdict) for each in silent), "equal"
    )
    tally = Tally(1)
    tally.add(screened)
    metrics = tally.finish_step(rows_of("s", [turn()], ["t1"]))
    groups = {name: value for name, value in metrics.items() if name.startswith("group/") and value}
    assert groups == {counted: 1}


def test_each_task_has_its_mean_reward_and_their_number_is_bounded() -> None:
    tally = Tally(1)

    def told(*groups: tuple[str | None, float]) -> dict[str, float]:
        for task_id, reward in groups:
            alone = Group("g", 1, (Member("s", (), (turn(),), reward, None, task_id=task_id),))
            tally.add(ScreenedGroup(alone, (), (), 0, (), None))
        found = tally.finish_step(rows_of("s", [turn()], ["t1"]))
        return {name: value for name, value in found.items() if name.startswith("reward/task/")}

    assert told(("sums-1", 1.0), ("sums-2", 0.0), ("tool", 0.25), (None, 1.0)) == {
        "reward/task/sums": 0.5,
        "reward/task/tool": 0.25,
    }
    assert told(("sums-3", 1.0), ("17", 0.5), ('a"b,c', 0.0)) == {
        "reward/task/a_b": 0.0,
        "reward/task/others": 0.5,
        "reward/task/sums": 1.0,
    }
    many = told(*((f"task{chr(65 + n)}", 1.0) for n in range(26)))
    assert (len(many), many["reward/task/others"]) == (14, 1.0), "16 of all that have come, and the others"


def test_only_traced_turns_that_are_trained_are_named() -> None:
    turns = (turn("prompt", trace="a"), turn("trained", trace="b"), turn("untraced"))
    row = PlannedRow("s1", turns, ("trained", "untraced"), {}, "g")
    assert list(traces_of([ScreenedGroup(Group("g", 1, ()), (row,), (), 1, (), None)])) == ["b"]
