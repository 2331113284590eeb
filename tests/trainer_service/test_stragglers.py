"""A group need not wait for its last member: at its deadline it goes, and who comes later hears why."""

import time
from typing import Any

import pytest

from tests.support.trainer_service.rig import MakeRig, Rig, turn

LATE = "its group went on without it, with 2 of its members"


def rig_with_deadline(make_rig: MakeRig, deadline_s: float = 60.0, **algorithm: Any) -> Rig:
    return make_rig(algorithm={"group_deadline_s": deadline_s, **algorithm}).start()


def pair(rig: Rig, size: int = 4, **fields: Any) -> None:
    """Two members that can be compared, of a group that has more."""
    rig.agents.episode("a", 1.0, group_id="g", size=size, **fields)
    rig.agents.episode("b", 0.0, group_id="g", size=size, output_ids=[12, 1], **fields)


def straggler(rig: Rig, session_id: str = "late", size: int = 4) -> None:
    rig.agents.open(session_id, "g", size)
    rig.agents.call(turn(session_id, f"{session_id}-t", group_id="g"))


def test_a_group_goes_at_its_deadline_without_its_stragglers(make_rig: MakeRig) -> None:
    rig = rig_with_deadline(make_rig)
    straggler(rig)
    pair(rig)
    assert rig.trainer.run_once()
    assert rig.session_codes() == {"a": "trained", "b": "trained", "late": None}
    rig.agents.finish("late", 1.0)
    assert not rig.trainer.run_once()
    verdict = rig.stream.heads["late"].verdict
    assert verdict is not None
    assert (verdict.code, verdict.detail) == ("group_incomplete", LATE)
    assert rig.stream.heads["late"].turn_verdicts["late-t"].code == "group_incomplete"
    assert not list(rig.stream.reclaim())


def test_before_its_deadline_a_group_waits(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with_deadline(make_rig, 3600.0)
    straggler(rig)
    pair(rig, at=time.time())
    assert not rig.trainer.run_once()
    later = time.time() + 3601.0
    monkeypatch.setattr("trainer_service.groups.assemble.time.time", lambda: later)
    assert rig.trainer.run_once()


def test_without_a_deadline_a_group_waits_for_its_last_member(make_rig: MakeRig) -> None:
    rig = make_rig().start()
    straggler(rig)
    pair(rig)
    assert not rig.trainer.run_once()


def test_a_group_of_fewer_than_the_minimum_waits_beyond_its_deadline(make_rig: MakeRig) -> None:
    rig = rig_with_deadline(make_rig, group_min_size=3)
    pair(rig, size=5)
    rig.agents.open("failed", "g", 5)
    rig.agents.finish("failed", status="failed")  # has ended, and compares with nobody
    assert not rig.trainer.run_once()
    assert "it goes without them once 1 more have a reward" in rig.shared_state.snapshot.waiting_for
    rig.agents.episode("c", 1.0, group_id="g", size=5)
    assert rig.trainer.run_once()


def test_members_that_failed_at_once_do_not_start_the_clock(make_rig: MakeRig) -> None:
    rig = rig_with_deadline(make_rig)
    rig.agents.open("failed", "g", 4)
    rig.agents.finish("failed", status="failed", at=100.0)
    pair(rig, at=time.time())
    assert not rig.trainer.run_once()


def test_rewards_that_go_on_coming_do_not_put_the_deadline_off(make_rig: MakeRig) -> None:
    rig = rig_with_deadline(make_rig)
    pair(rig)
    for session_id in ("a", "b"):
        rig.agents.reward(session_id, 0.25, key="more", at=time.time())
    assert rig.trainer.run_once()
    assert rig.session_codes() == {"a": "trained", "b": "trained"}


@pytest.mark.parametrize("heard_of", [True, False])
def test_who_comes_after_a_restart_is_known_for_late(make_rig: MakeRig, heard_of: bool) -> None:
    rig = rig_with_deadline(make_rig)
    if heard_of:
        straggler(rig)
    pair(rig)
    assert rig.trainer.run_once()
    rig = rig.restart()
    if not heard_of:
        straggler(rig)
    rig.agents.finish("late", 1.0)
    assert not rig.trainer.run_once()
    assert rig.session_codes()["late"] == "group_incomplete"
    assert not list(rig.stream.reclaim())
    assert rig.trainer.step == 1


def test_a_straggler_that_is_restarted_upon_is_trained_in_no_other_step(make_rig: MakeRig) -> None:
    rig = rig_with_deadline(make_rig)
    for session_id in ("late", "later"):
        straggler(rig, session_id)
    pair(rig)
    assert rig.trainer.run_once()
    for session_id, value in (("late", 1.0), ("later", 0.0)):
        rig.agents.finish(session_id, value)
    rig = rig.restart()
    assert not rig.trainer.run_once()
    assert rig.session_codes()["late"] == rig.session_codes()["later"] == "group_incomplete"


def test_a_straggler_that_finishes_without_a_reward_waits_for_none(make_rig: MakeRig) -> None:
    rig = rig_with_deadline(make_rig)
    straggler(rig)
    pair(rig)
    assert rig.trainer.run_once()
    rig.agents.finish("late")
    assert not rig.trainer.run_once()
    assert rig.session_codes()["late"] == "group_incomplete"
    rig.agents.reward("late", 1.0)  # kept by the gateway as late
    assert not rig.trainer.run_once()
    assert not list(rig.stream.reclaim())


def test_a_straggler_that_fails_or_is_deleted_keeps_that_verdict(make_rig: MakeRig) -> None:
    rig = rig_with_deadline(make_rig)
    for session_id in ("failed", "gone"):
        straggler(rig, session_id)
    pair(rig)
    assert rig.trainer.run_once()
    rig.agents.finish("failed", status="failed")
    rig.agents.delete("gone")
    assert not rig.trainer.run_once()
    assert rig.session_codes()["failed"] is None  # the gateway's own verdict stands
    assert not list(rig.stream.reclaim())


def test_a_stuck_straggler_does_not_keep_other_groups_waiting(make_rig: MakeRig) -> None:
    rig = rig_with_deadline(make_rig)
    straggler(rig)
    pair(rig)
    assert rig.trainer.run_once()
    rig.agents.group("h", [1.0, 0.0])
    assert rig.trainer.run_once()
    assert len(list(rig.stream.reclaim())) == 1  # its turn: it may still end


def test_a_deadline_is_not_told_before_everything_was_read(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.intake.entry_reader.READ_COUNT", 3)
    rig = rig_with_deadline(make_rig)
    rig.agents.group("g", [1.0, 0.0, 1.0])
    assert not rig.trainer.run_once()
    assert not rig.trainer.run_once()
    assert rig.trainer.run_once()
    assert len(rig.checkpoints.ledger(0, 10)[0].sessions) == 3


def test_a_member_that_a_silent_group_went_without_is_late_too(make_rig: MakeRig) -> None:
    rig = make_rig(algorithm={"group_wait_s": 1.0}).start()
    pair(rig)
    assert rig.trainer.run_once()
    straggler(rig)
    rig.agents.finish("late", 1.0)
    assert not rig.trainer.run_once()
    assert rig.session_codes()["late"] == "group_incomplete"


def test_the_trainer_says_which_groups_wait_for_what(make_rig: MakeRig) -> None:
    rig = rig_with_deadline(make_rig, 60.0)
    begun = time.time() - 40
    for name in ("g", "h"):
        rig.agents.episode(f"{name}-a", 1.0, group_id=name, size=4, at=begun)
        rig.agents.episode(f"{name}-b", 0.0, group_id=name, size=4, at=begun + 5)
        rig.agents.open(f"{name}-c", name, 4)
    rig.agents.group("whole", [1.0, 1.0])
    assert not rig.trainer.run_once()
    said = rig.shared_state.snapshot.waiting_for
    assert "; 2 groups wait for 4 members that go on; the oldest since 40 s, " in said
    assert said.endswith(("it goes without them in 20 s", "it goes without them in 19 s"))
