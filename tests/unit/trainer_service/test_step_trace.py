"""The span of a step names the spans of the turns that the step trains."""

from tests.support.queue.records import turn
from trainer_service.groups.assemble import Group
from trainer_service.groups.screening import ScreenedGroup
from trainer_service.rows.rows import PlannedRow
from trainer_service.step.step_trace import traces_of


def test_only_traced_turns_that_are_trained_are_named() -> None:
    turns = (turn("prompt", trace="a"), turn("trained", trace="b"), turn("untraced"))
    row = PlannedRow("s1", turns, ("trained", "untraced"), {}, "g")
    assert list(traces_of([ScreenedGroup(Group("g", 1, ()), (row,), (), 1, (), None)])) == ["b"]
