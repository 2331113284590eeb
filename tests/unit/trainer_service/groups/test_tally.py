"""Each group without an advantage counts once: as one of equal rewards, or as one of a single rollout."""

import pytest

from rollout_queue.contract.records import Verdict
from tests.support.queue.records import turn
from tests.support.trainer_service.made_rows import rows_of
from trainer_service.groups.assemble import Group
from trainer_service.groups.episode import Member
from trainer_service.groups.screening import ScreenedGroup
from trainer_service.groups.tally import Tally


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
