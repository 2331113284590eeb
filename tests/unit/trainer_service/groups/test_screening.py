"""How old a group is: what its newest token says where old tokens are masked, else its newest rollout."""

import pytest

from rollout_queue.contract.records import Span
from tests.support.queue.records import turn
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group
from trainer_service.groups.episode import Member
from trainer_service.groups.screening import is_too_old


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
