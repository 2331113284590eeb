"""More members of a group are sampled than it needs. It is trained with those that end first."""

from typing import Any

import pytest

from tests.support.trainer_service.harness import Harness, MakeHarness, turn

SIZE = 4


def over_sampling(make_harness: MakeHarness, share: float = 0.5, **algorithm: Any) -> Harness:
    return make_harness(algorithm={"over_sampling": share, **algorithm}).start()


def member(harness: Harness, name: str, value: float, at: float = 103.0) -> None:
    harness.agents.episode(name, value, group_id="g", size=SIZE, output_ids=[ord(name) - 90, 1], at=at)


def unfinished(harness: Harness, name: str) -> None:
    harness.agents.open(name, "g", SIZE)
    harness.agents.call(turn(name, f"{name}-t", group_id="g"))


def test_a_group_is_trained_when_enough_members_have_ended(make_harness: MakeHarness) -> None:
    harness = over_sampling(make_harness)
    unfinished(harness, "c")
    member(harness, "a", 1.0)
    assert not harness.trainer.run_once()
    assert "; 1 group waits for 1 unfinished member; " in harness.shared_state.snapshot.waiting_for
    member(harness, "b", 0.0)
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained", "c": None}
    harness.agents.finish("c", 1.0)
    member(harness, "d", 1.0)
    assert not harness.trainer.run_once()
    for name in ("c", "d"):
        verdict = harness.stream.heads[name].verdict
        assert verdict is not None
        assert verdict.code == "group_incomplete"
        assert verdict.detail == "its group went on without it, with 2 of its members"
    assert not list(harness.stream.reclaim())


def test_a_group_that_waits_for_its_step_keeps_the_members_that_ended_first(
    make_harness: MakeHarness,
) -> None:
    harness = over_sampling(make_harness, min_live_rows=4, max_tokens=6)
    for name, value, at in (("a", 1.0, 110.0), ("b", 0.0, 120.0)):
        member(harness, name, value, at)
    assert not harness.trainer.run_once()
    assert "tokens are already learned" in harness.shared_state.snapshot.waiting_for
    for name, value, at in (("c", 1.0, 130.0), ("d", 0.0, 140.0)):
        member(harness, name, value, at)
    harness.agents.group("h", [1.0, 0.0])
    assert harness.trainer.run_once()
    codes = harness.session_codes()
    assert [codes[name] for name in "ab"] == ["trained", "trained"]
    assert harness.shared_state.snapshot.metrics["early_frac"] > 0, "what was learned early is kept"
    assert not harness.trainer.run_once()
    codes = harness.session_codes()
    assert [codes[name] for name in "cd"] == ["group_incomplete", "group_incomplete"]
    assert not list(harness.stream.reclaim())


def test_members_that_failed_are_not_among_the_first(make_harness: MakeHarness) -> None:
    harness = over_sampling(make_harness)
    for name in "xy":
        harness.agents.open(name, "g", SIZE)
        harness.agents.finish(name, status="failed", at=101.0)
    member(harness, "a", 1.0)
    assert not harness.trainer.run_once()
    member(harness, "b", 0.0)
    assert harness.trainer.run_once()
    assert [harness.session_codes()[name] for name in "ab"] == ["trained", "trained"]
    assert not list(harness.stream.reclaim())


@pytest.mark.parametrize("read_before", [True, False])
def test_after_a_restart_a_surplus_member_is_not_trained(
    make_harness: MakeHarness, read_before: bool
) -> None:
    harness = over_sampling(make_harness)
    if read_before:
        unfinished(harness, "c")
    for name, value in (("a", 1.0), ("b", 0.0)):
        member(harness, name, value)
    assert harness.trainer.run_once()
    harness = harness.restart()
    if not read_before:
        unfinished(harness, "c")
    harness.agents.finish("c", 1.0)
    member(harness, "d", 0.0)
    assert not harness.trainer.run_once()
    assert {name: harness.session_codes()[name] for name in "cd"} == dict.fromkeys("cd", "group_incomplete")
    assert harness.trainer.step == 1
    assert not list(harness.stream.reclaim())


def test_a_group_needs_its_minimum_however_large_the_share(make_harness: MakeHarness) -> None:
    harness = over_sampling(make_harness, 0.9)
    member(harness, "a", 1.0)
    assert not harness.trainer.run_once()
    member(harness, "b", 0.0)
    assert harness.trainer.run_once()
