"""A group need not wait for its last member. It is trained at a deadline, and late members get a verdict."""

import time
from typing import Any

import pytest

from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.turned_clock import TurnedClock

LATE = "its group went on without it, with 2 of its members"


def harness_with_deadline(make_harness: MakeHarness, deadline_s: float = 60.0, **algorithm: Any) -> Harness:
    return make_harness(algorithm={"group_deadline_s": deadline_s, **algorithm}).start()


def pair(harness: Harness, size: int = 4, **fields: Any) -> None:
    """Two finished members of a group of `size`."""
    harness.agents.episode("a", 1.0, group_id="g", size=size, **fields)
    harness.agents.episode("b", 0.0, group_id="g", size=size, output_ids=[12, 1], **fields)


def straggler(harness: Harness, session_id: str = "late", size: int = 4) -> None:
    harness.agents.open(session_id, "g", size)
    harness.agents.call(turn(session_id, f"{session_id}-t", group_id="g"))


def test_a_group_is_trained_at_its_deadline_without_its_stragglers(make_harness: MakeHarness) -> None:
    harness = harness_with_deadline(make_harness)
    straggler(harness)
    pair(harness)
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained", "late": None}
    harness.agents.finish("late", 1.0)
    assert not harness.trainer.run_once()
    verdict = harness.stream.heads["late"].verdict
    assert verdict is not None
    assert (verdict.code, verdict.detail) == ("group_incomplete", LATE)
    assert harness.stream.heads["late"].turn_verdicts["late-t"].code == "group_incomplete"
    assert not list(harness.stream.reclaim())


def test_before_its_deadline_a_group_waits(make_harness: MakeHarness, turned: TurnedClock) -> None:
    harness = harness_with_deadline(make_harness, 3600.0)
    straggler(harness)
    pair(harness, at=time.time())
    assert not harness.trainer.run_once()
    turned.turn(3601)
    assert harness.trainer.run_once()


def test_without_a_deadline_a_group_waits_for_its_last_member(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    straggler(harness)
    pair(harness)
    assert not harness.trainer.run_once()


def test_a_group_of_fewer_than_the_minimum_waits_beyond_its_deadline(make_harness: MakeHarness) -> None:
    harness = harness_with_deadline(make_harness, group_min_size=3)
    pair(harness, size=5)
    harness.agents.open("failed", "g", 5)
    harness.agents.finish("failed", status="failed")  # a failed member has no reward to compare
    assert not harness.trainer.run_once()
    assert (
        "and is trained without them when 1 more have a reward" in harness.shared_state.snapshot.waiting_for
    )
    harness.agents.episode("c", 1.0, group_id="g", size=5)
    assert harness.trainer.run_once()


def test_members_that_failed_at_once_do_not_start_the_clock(make_harness: MakeHarness) -> None:
    harness = harness_with_deadline(make_harness)
    harness.agents.open("failed", "g", 4)
    harness.agents.finish("failed", status="failed", at=100.0)
    pair(harness, at=time.time())
    assert not harness.trainer.run_once()


def test_further_rewards_do_not_delay_the_deadline(make_harness: MakeHarness) -> None:
    harness = harness_with_deadline(make_harness)
    pair(harness)
    for session_id in ("a", "b"):
        harness.agents.reward(session_id, 0.25, key="more", at=time.time())
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained"}


@pytest.mark.parametrize("heard_of", [True, False])
def test_a_member_that_comes_after_a_restart_is_still_late(make_harness: MakeHarness, heard_of: bool) -> None:
    harness = harness_with_deadline(make_harness)
    if heard_of:
        straggler(harness)
    pair(harness)
    assert harness.trainer.run_once()
    harness = harness.restart()
    if not heard_of:
        straggler(harness)
    harness.agents.finish("late", 1.0)
    assert not harness.trainer.run_once()
    assert harness.session_codes()["late"] == "group_incomplete"
    assert not list(harness.stream.reclaim())
    assert harness.trainer.step == 1


def test_a_straggler_that_ends_before_a_restart_is_not_trained_after_it(make_harness: MakeHarness) -> None:
    harness = harness_with_deadline(make_harness)
    for session_id in ("late", "later"):
        straggler(harness, session_id)
    pair(harness)
    assert harness.trainer.run_once()
    for session_id, value in (("late", 1.0), ("later", 0.0)):
        harness.agents.finish(session_id, value)
    harness = harness.restart()
    assert not harness.trainer.run_once()
    assert harness.session_codes()["late"] == harness.session_codes()["later"] == "group_incomplete"


def test_a_straggler_that_finishes_without_a_reward_ends_at_once(make_harness: MakeHarness) -> None:
    harness = harness_with_deadline(make_harness)
    straggler(harness)
    pair(harness)
    assert harness.trainer.run_once()
    harness.agents.finish("late")
    assert not harness.trainer.run_once()
    assert harness.session_codes()["late"] == "group_incomplete"
    harness.agents.reward("late", 1.0)  # kept by the gateway as late
    assert not harness.trainer.run_once()
    assert not list(harness.stream.reclaim())


def test_a_straggler_that_fails_or_is_deleted_keeps_that_verdict(make_harness: MakeHarness) -> None:
    harness = harness_with_deadline(make_harness)
    for session_id in ("failed", "gone"):
        straggler(harness, session_id)
    pair(harness)
    assert harness.trainer.run_once()
    harness.agents.finish("failed", status="failed")
    harness.agents.delete("gone")
    assert not harness.trainer.run_once()
    assert harness.session_codes()["failed"] is None  # the gateway's own verdict stands
    assert not list(harness.stream.reclaim())


def test_a_stuck_straggler_does_not_keep_other_groups_waiting(make_harness: MakeHarness) -> None:
    harness = harness_with_deadline(make_harness)
    straggler(harness)
    pair(harness)
    assert harness.trainer.run_once()
    harness.agents.group("h", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert len(list(harness.stream.reclaim())) == 1  # the turn of the straggler, which may still end


def test_a_deadline_does_not_apply_before_the_whole_stream_is_read(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.intake.entry_reader.READ_COUNT", 3)
    harness = harness_with_deadline(make_harness)
    harness.agents.group("g", [1.0, 0.0, 1.0])
    assert not harness.trainer.run_once()
    assert not harness.trainer.run_once()
    assert harness.trainer.run_once()
    assert len(harness.checkpoints.ledger(0, 10)[0].sessions) == 3


def test_a_member_of_an_overdue_group_is_late_too(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"group_wait_s": 1.0}).start()
    pair(harness)
    assert harness.trainer.run_once()
    straggler(harness)
    harness.agents.finish("late", 1.0)
    assert not harness.trainer.run_once()
    assert harness.session_codes()["late"] == "group_incomplete"


def test_the_trainer_says_which_groups_wait_for_what(make_harness: MakeHarness) -> None:
    harness = harness_with_deadline(make_harness, 60.0)
    begun = time.time() - 40
    for name in ("g", "h"):
        harness.agents.episode(f"{name}-a", 1.0, group_id=name, size=4, at=begun)
        harness.agents.episode(f"{name}-b", 0.0, group_id=name, size=4, at=begun + 5)
        harness.agents.open(f"{name}-c", name, 4)
    harness.agents.group("whole", [1.0, 1.0])
    assert not harness.trainer.run_once()
    said = harness.shared_state.snapshot.waiting_for
    assert "; 2 groups wait for 4 unfinished members; the oldest has waited 40 s, " in said
    assert said.endswith(("is trained without them in 20 s", "is trained without them in 19 s"))
