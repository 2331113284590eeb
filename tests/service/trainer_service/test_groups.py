"""When a group is trained: at its last member, its deadline, or with enough members; and before others, if
its task is sometimes solved. What late, deleted and joining members change."""

import asyncio
import gc
import sys
import time
from gc import collect  # the real one, also where a fixture spares DeepSpeed's collections
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_queue.contract.records import Deletion, Outcome, Record, Reward, SessionSpec, Turn
from rollout_queue.contract.stream import Entry
from tests.support.tolerances import FLOAT64, ulps
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.turned_clock import TurnedClock
from trainer_service.algorithms.settings import CurriculumSettings
from trainer_service.groups.assemble import Assembler, Rules
from trainer_service.groups.task_rates import TaskRate, TaskRates, lot

LATE = ("group_incomplete", "its group went on without it, with 2 of its members")


def with_deadline(make_harness: MakeHarness, deadline_s: float = 60.0, **algorithm: Any) -> Harness:
    return make_harness(algorithm={"group_deadline_s": deadline_s, **algorithm}).start()


def pair(harness: Harness, size: int = 4, **fields: Any) -> None:
    """Two finished members of a group of `size`."""
    harness.agents.episode("a", 1.0, group_id="g", size=size, **fields)
    harness.agents.episode("b", 0.0, group_id="g", size=size, output_ids=[12, 1], **fields)


def straggler(harness: Harness, session_id: str = "late", size: int = 4) -> None:
    """A member of the same group that has made a call, and goes on."""
    harness.agents.open(session_id, "g", size)
    harness.agents.call(turn(session_id, f"{session_id}-t", group_id="g"))


def ending(harness: Harness, session_id: str) -> tuple[str, str]:
    """The code and the detail of its verdict."""
    verdict = harness.verdict(session_id)
    return verdict.code, verdict.detail


def test_a_group_is_trained_at_its_deadline_without_its_stragglers(make_harness: MakeHarness) -> None:
    """And without any of their ends changing anything. Other groups do not wait for them."""
    harness, stragglers = with_deadline(make_harness), ("late", "poor", "failed", "gone")
    for session_id in stragglers:
        straggler(harness, session_id, size=6)
    pair(harness, size=6)
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained"} | dict.fromkeys(stragglers)
    harness.step("h")
    assert len(harness.pending) == 4, "the turn of each straggler, which may still end"
    harness.agents.finish("late", 1.0)
    harness.agents.finish("poor")
    harness.agents.finish("failed", status="failed")
    harness.agents.delete("gone")
    assert not harness.trainer.run_once()
    assert ending(harness, "late") == ending(harness, "poor") == LATE
    assert harness.stream.heads["late"].turn_verdicts["late-t"].code == "group_incomplete"
    assert harness.session_codes()["failed"] is None, "the gateway's own verdict stands"
    harness.agents.reward("poor", 1.0)  # kept by the gateway as late
    assert not harness.trainer.run_once()
    assert not harness.pending


def test_before_its_deadline_a_group_waits(make_harness: MakeHarness, turned: TurnedClock) -> None:
    """A member that failed at once does not start the clock, and a further reward does not stop it."""
    harness = with_deadline(make_harness, 3600.0)
    harness.agents.open("failed", "g", 4)
    harness.agents.finish("failed", status="failed", at=100.0)
    straggler(harness)
    pair(harness, at=time.time())
    assert not harness.trainer.run_once()
    turned.turn(3601)
    for session_id in ("a", "b"):
        harness.agents.reward(session_id, 0.25, key="more", at=time.time() + 3601)
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"failed": None, "late": None, "a": "trained", "b": "trained"}


def test_a_group_of_fewer_than_the_minimum_waits_beyond_its_deadline(make_harness: MakeHarness) -> None:
    harness = with_deadline(make_harness, group_min_size=3)
    pair(harness, size=5)
    harness.agents.open("failed", "g", 5)
    harness.agents.finish("failed", status="failed")  # a failed member has no reward to compare
    assert not harness.trainer.run_once()
    assert "and is trained without them when 1 more have a reward" in harness.waits_for
    harness.agents.episode("c", 1.0, group_id="g", size=5)
    assert harness.trainer.run_once()


@pytest.mark.parametrize("before", ["unknown", "heard of", "ended"])
def test_a_straggler_is_late_over_a_restart_too(make_harness: MakeHarness, before: str) -> None:
    harness = with_deadline(make_harness)
    if before != "unknown":
        straggler(harness)
    pair(harness)
    assert harness.trainer.run_once()
    if before == "ended":
        harness.agents.finish("late", 1.0)
    harness = harness.restart()
    if before == "unknown":
        straggler(harness)
    if before != "ended":
        harness.agents.finish("late", 1.0)
    assert not harness.trainer.run_once()
    assert harness.session_codes()["late"] == "group_incomplete"
    assert not harness.pending
    assert harness.trainer.step == 1


def test_a_deadline_does_not_apply_before_the_whole_stream_is_read(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.entry_reader.READ_COUNT", 3)
    harness = with_deadline(make_harness)
    harness.agents.group("g", [1.0, 0.0, 1.0])
    assert not harness.trainer.run_once()
    assert not harness.trainer.run_once()
    assert harness.trainer.run_once()
    assert len(harness.ledger[0].sessions) == 3


def test_a_member_of_an_overdue_group_is_late_too(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"group_wait_s": 1.0}).start()
    pair(harness)
    assert harness.trainer.run_once()
    straggler(harness)
    harness.agents.finish("late", 1.0)
    assert not harness.trainer.run_once()
    assert harness.session_codes()["late"] == "group_incomplete"


def test_the_trainer_says_which_groups_wait_for_what(make_harness: MakeHarness, stopped: TurnedClock) -> None:
    harness = with_deadline(make_harness, 60.0)
    begun = stopped.now() - 40
    for name in ("g", "h"):
        harness.agents.episode(f"{name}-a", 1.0, group_id=name, size=4, at=begun)
        harness.agents.episode(f"{name}-b", 0.0, group_id=name, size=4, at=begun + 5)
        harness.agents.open(f"{name}-c", name, 4)
    harness.agents.group("whole", [1.0, 1.0])
    assert not harness.trainer.run_once()
    assert "; 2 groups wait for 4 unfinished members; the oldest has waited 40 s, " in harness.waits_for
    assert harness.waits_for.endswith("is trained without them in 20 s")


def over_sampling(make_harness: MakeHarness, share: float = 0.5, **algorithm: Any) -> Harness:
    return make_harness(algorithm={"over_sampling": share, **algorithm}).start()


def member(harness: Harness, name: str, value: float, at: float = 103.0) -> None:
    harness.agents.episode(name, value, group_id="g", size=4, output_ids=[ord(name) - 90, 1], at=at)


def test_a_group_is_trained_when_enough_members_have_ended(make_harness: MakeHarness) -> None:
    """Members that failed are not among them."""
    harness = over_sampling(make_harness)
    harness.agents.open("failed", "g", 4)
    harness.agents.finish("failed", status="failed", at=101.0)
    straggler(harness, "c")
    member(harness, "a", 1.0)
    assert not harness.trainer.run_once()
    assert "; 1 group waits for 1 unfinished member; " in harness.waits_for
    member(harness, "b", 0.0)
    assert harness.trainer.run_once()
    assert [harness.session_codes()[name] for name in "abc"] == ["trained", "trained", None]
    harness.agents.finish("c", 1.0)
    assert not harness.trainer.run_once()
    assert ending(harness, "c") == (LATE[0], LATE[1].replace("2", "3"))
    assert not harness.pending


def test_a_group_that_waits_for_its_step_keeps_its_first_members(
    make_harness: MakeHarness,
) -> None:
    harness = over_sampling(make_harness, min_live_rows=4, max_tokens=6)
    for name, value, at in (("a", 1.0, 110.0), ("b", 0.0, 120.0)):
        member(harness, name, value, at)
    assert not harness.trainer.run_once()
    assert "tokens are already learned" in harness.waits_for
    for name, value, at in (("c", 1.0, 130.0), ("d", 0.0, 140.0)):
        member(harness, name, value, at)
    harness.step("h")
    codes = harness.session_codes()
    assert [codes[name] for name in "ab"] == ["trained", "trained"]
    assert harness.told["early_frac"] > 0, "what was learned early is kept"
    assert not harness.trainer.run_once()
    codes = harness.session_codes()
    assert [codes[name] for name in "cd"] == ["group_incomplete", "group_incomplete"]
    assert not harness.pending


@pytest.mark.parametrize("read_before", [True, False])
def test_no_surplus_member_is_trained_after_a_restart(make_harness: MakeHarness, read_before: bool) -> None:
    harness = over_sampling(make_harness)
    if read_before:
        straggler(harness, "c")
    for name, value in (("a", 1.0), ("b", 0.0)):
        member(harness, name, value)
    assert harness.trainer.run_once()
    harness = harness.restart()
    if not read_before:
        straggler(harness, "c")
    harness.agents.finish("c", 1.0)
    member(harness, "d", 0.0)
    assert not harness.trainer.run_once()
    assert {name: harness.session_codes()[name] for name in "cd"} == dict.fromkeys("cd", "group_incomplete")
    assert harness.trainer.step == 1
    assert not harness.pending


def late_join(harness: Harness, session_id: str, task_id: str | None = None) -> None:
    """A session that a call opened, and that got the group `g` of three after its first turn."""
    spec = SessionSpec(session_id=session_id, created_at=100.0, implicit=True)
    asyncio.run(harness.stream.open_session(spec))
    harness.agents.call(turn(session_id, f"{session_id}-t", output_ids=[15, 1]))
    asked = SessionSpec(session_id=session_id, created_at=100.0, group_id="g", group_size=3, task_id=task_id)
    assert asyncio.run(harness.stream.describe_session(asked, 102.0)) == asked


@pytest.mark.parametrize("restarted", [False, True])
def test_the_group_of_a_session_that_joined_late_waits_for_it_and_is_trained_with_it(
    make_harness: MakeHarness, restarted: bool
) -> None:
    """Without the late join, the group would go on after `group_wait_s`: no other record names it."""
    harness = make_harness(algorithm={"group_wait_s": 1.0}).start()
    late_join(harness, "late")
    pair(harness, size=3)
    assert not harness.trainer.run_once()
    if restarted:
        harness = harness.restart()
        assert not harness.trainer.run_once()
    harness.agents.finish("late", 0.5)
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained", "late": "trained"}
    assert harness.ledger[0].sessions == ["a", "b", "late"]
    assert not harness.pending


def test_a_session_that_is_deleted_after_it_joined_counts_as_a_member(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    late_join(harness, "late")
    pair(harness, size=3)
    assert not harness.trainer.run_once()
    harness.agents.delete("late")
    assert harness.trainer.run_once()
    assert harness.ledger[0].sessions == ["a", "b"]


def test_its_task_counts_although_its_turns_do_not_name_it(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"curriculum": {"memory": 8}}).start()
    for name, value in (("a", 1.0), ("b", 0.0), ("c", 0.5)):
        late_join(harness, name, "sums")
        harness.agents.finish(name, value)
    assert harness.trainer.run_once()
    assert [each.task_id for each in harness.shared_state.tasks] == ["sums"]


OUR_PACKAGES = ("trainer_service", "rollout_queue")
RULES = Rules(vocab_size=64, train_truncated=False, group_wait_s=1e12)


def deletion(session_id: str, group_id: str | None = "g", size: int | None = 3) -> Deletion:
    return Deletion(session_id=session_id, created_at=110.0, group_id=group_id, group_size=size)


def episode(session_id: str, first: int, value: float) -> list[Entry]:
    """The three entries of a finished member of group g."""
    outcome = Outcome(session_id=session_id, status="completed", created_at=103.0, group_id="g", group_size=3)
    records: tuple[Record, ...] = (
        turn(session_id, f"{session_id}-t", group_id="g"),
        Reward(session_id=session_id, value=value, key="k", created_at=102.0),
        outcome,
    )
    return [Entry(f"{first + index}-0", record) for index, record in enumerate(records)]


def turns_in_memory(session_id: str) -> int:
    """Count the turns of a session in memory. The garbage collector tracks neither turns nor all objects that
    refer to them. So the search also follows untracked objects. It also begins at the globals of Weir's
    modules, because frozen objects are not listed."""
    collect()
    ours = [vars(module) for name, module in sys.modules.items() if name.startswith(OUR_PACKAGES)]
    holders = [*gc.get_objects(), *(value for names in ours for value in names.values())]
    held: dict[int, Any] = {}
    while holders:
        new = [
            each for each in gc.get_referents(*holders) if id(each) not in held and not gc.is_tracked(each)
        ]
        held |= {id(each): each for each in new}
        holders = new
    return sum(type(each) is Turn and each.session_id == session_id for each in held.values())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_group_goes_on_without_a_member_that_was_deleted(harness: Harness, restarted: bool) -> None:
    straggler(harness, "gone", size=3)
    assert not harness.trainer.run_once()
    harness.agents.delete("gone")
    assert not harness.trainer.run_once()
    assert len(harness.pending) == 1
    if restarted:
        harness = harness.restart()
    pair(harness, size=3)
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained"}
    assert not harness.pending
    assert harness.ledger[0].sessions == ["a", "b"]
    assert harness.stream.counts == {"session:deleted": 1, "session:trained": 2, "turn:trained": 2}


def test_a_member_that_was_deleted_before_its_group_trains_is_not_trained(harness: Harness) -> None:
    for session_id, value in (("a", 1.0), ("b", 0.0), ("gone", 5.0)):
        harness.agents.episode(session_id, value, group_id="g", size=4)
    assert not harness.trainer.run_once()
    harness.agents.delete("gone")
    assert not harness.trainer.run_once()
    harness.agents.episode("c", 0.5, group_id="g", size=4)
    assert harness.trainer.run_once()
    assert harness.ledger[0].sessions == ["a", "b", "c"]
    assert not harness.pending


def test_a_batch_that_waits_for_more_rows_loses_a_deleted_session(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"min_live_rows": 4}).start()
    harness.agents.group("g", [1.0, 0.0, 0.5])
    assert not harness.trainer.run_once()
    assert "of which 2 are here" in harness.waits_for  # the third has the mean reward, and so no advantage
    before = turns_in_memory("g-0")
    harness.agents.delete("g-0")
    assert not harness.trainer.run_once()
    assert before > 0 == turns_in_memory("g-0")
    harness.step("h")
    assert harness.ledger[0].sessions == ["g-1", "g-2", "h-0", "h-1"]


@pytest.mark.parametrize("group_id", [None, "g"])
def test_a_deleted_session_alone_is_acknowledged(harness: Harness, group_id: str | None) -> None:
    harness.agents.open("alone", group_id, 1 if group_id else None)
    harness.agents.call(turn("alone", group_id=group_id))
    assert not harness.trainer.run_once()
    harness.agents.delete("alone")
    harness.stream.append(deletion("nobody", None, None))
    assert not harness.trainer.run_once()
    assert not harness.pending


def test_the_deletion_of_a_trained_session_changes_nothing(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(checkpoint_every_steps=10).start()
    harness.step("g")
    harness.agents.delete("g-0")
    assert not harness.trainer.run_once()
    harness.save()
    assert harness.session_codes() == {"g-1": "trained"}
    assert harness.ledger[0].sessions == ["g-0", "g-1"]
    assert not harness.pending
    assert not harness.restart().trainer.run_once()


def test_a_lost_step_is_repeated_without_a_member_that_was_deleted(make_harness: MakeHarness) -> None:
    harness = make_harness(checkpoint_every_steps=10).start()
    harness.agents.group("g", [1.0, 0.0, 0.5])
    assert harness.trainer.run_once()
    harness.agents.delete("g-0")
    assert not harness.trainer.run_once()
    harness = harness.restart()
    assert harness.trainer.run_once()
    harness.save()
    assert harness.ledger[0].sessions == ["g-1", "g-2"]
    assert not harness.pending


def test_a_deletion_that_arrives_during_a_step_does_not_change_the_step() -> None:
    assembler = Assembler(RULES)
    assembler.add([*episode("a", 1, 1.0), *episode("b", 4, 0.0), *episode("c", 7, 0.5)])
    (group,) = assembler.complete(caught_up=True)
    assembler.add([Entry("10-0", deletion("a"))])
    assembler.release(group)
    assert [member.reward for member in group.members] == [1.0, 0.0, 0.5]
    assert "10-0" in assembler.take_useless_entries()[1]
    assert not assembler.complete(caught_up=True)


@pytest.mark.parametrize("first", ["deletion", "turns"])
def test_a_deletion_may_come_before_or_after_the_records_that_it_deletes(first: str) -> None:
    deleted = [Entry("20-0", deletion("c"))]
    parts = [deleted, episode("c", 7, 9.0)] if first == "deletion" else [episode("c", 7, 9.0), deleted]
    assembler = Assembler(RULES)
    assembler.add([entry for part in parts for entry in part])
    assert sorted(assembler.take_useless_entries()[0]) == ["7-0", "8-0", "9-0"]
    assert not assembler.complete(caught_up=True)
    assembler.add([*episode("a", 1, 1.0), *episode("b", 4, 0.0)])
    (group,) = assembler.complete(caught_up=True)
    assert [(member.session_id, member.reward) for member in group.members] == [
        ("a", 1.0), ("b", 0.0), ("c", None),
    ]  # fmt: skip
    assert group.members[2].entry_ids == ("20-0",)


MEMORY = 8
FLOOR = 4 * (MEMORY + 1) / (MEMORY + 2) ** 2
"""The weight of a task whose last rollouts, more than it remembers, all passed: p = (8 + 1) / (8 + 2)."""


def with_curriculum(make_harness: MakeHarness, **algorithm: Any) -> Harness:
    return make_harness(algorithm={"curriculum": {"memory": MEMORY}, **algorithm}).start()


def play(harness: Harness, task: str, *rewards: float) -> None:
    """Rollouts of a task in one group; a group of equal rewards ends without a step."""
    harness.agents.group(f"{task}-{len(harness.stream.heads)}", rewards, task_id=task)


def tasks(harness: Harness) -> list[dict[str, Any]]:
    client = harness.door()
    page = client.get("/tasks", params={"limit": 2}).json()
    found: list[dict[str, Any]] = page["data"]
    while page["next_cursor"]:
        page = client.get("/tasks", params={"limit": 2, "cursor": page["next_cursor"]}).json()
        found += page["data"]
    return found


def test_groups_of_solved_and_of_hopeless_tasks_come_after_the_others(make_harness: MakeHarness) -> None:
    algorithm = {"curriculum": {"memory": 32}, "max_rows": 2, "max_staleness": 100}
    harness = make_harness(algorithm=algorithm).start()
    for _ in range(3):
        play(harness, "solved", *[1.0] * 32)
        play(harness, "hopeless", *[0.0] * 32)
        play(harness, "open", *[1.0, 0.0] * 16)
        assert harness.trainer.run_once()
    weights = {rate["task_id"]: rate["weight"] for rate in tasks(harness)}
    assert weights["solved"] == pytest.approx(weights["hopeless"], rel=1e-9)
    assert weights["solved"] < 0.13 < 0.99 < weights["open"], "4 · 33 · 1 / 34², and nearly 4 / 2²"
    for place in range(5):
        harness.agents.group(f"open{place}", [1.0, 0.0], task_id="open", at=200.0 + place)
        harness.agents.group(f"solved{place}", [1.0, 0.9], task_id="solved", at=300.0 + place)
        harness.agents.group(f"hopeless{place}", [0.1, 0.0], task_id="hopeless", at=300.0 + place)
    trained = []
    while harness.trainer.run_once():
        trained.append(harness.ledger[-1].sessions[0].rstrip("-0123456789"))
    assert len(trained) == 15, "in the end all are trained"
    # Of the 10 others, which are newer, 1.3 are preferred in the mean.
    assert trained[:9].count("open") == 5


def test_the_weights_of_tasks_are_shown(make_harness: MakeHarness) -> None:
    harness = with_curriculum(make_harness)
    play(harness, "solved", 1.0, 1.0)
    play(harness, "hopeless", 0.0, 0.0)
    play(harness, "open", 1.0, 0.0)
    harness.step("nameless")
    shown = tasks(harness)
    assert tasks(harness.restart()) == shown, "a checkpoint keeps them"
    assert {row["task_id"]: (row["pass_rate"], row["weight"]) for row in shown} == {
        "hopeless": (pytest.approx(1 / 3.875, rel=1e-9), pytest.approx(4 * 2.875 / 3.875**2, rel=1e-9)),
        "open": (pytest.approx(1.875 / 3.875, rel=1e-9), pytest.approx(4 * 1.875 * 2 / 3.875**2, rel=1e-9)),
        "solved": (pytest.approx(2.875 / 3.875, rel=1e-9), pytest.approx(4 * 2.875 / 3.875**2, rel=1e-9)),
    }


def test_the_oldest_tasks_are_forgotten(make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_service.groups.task_rates.TASKS_KEPT", 2)
    harness = with_curriculum(make_harness)
    for task in ("a", "b", "a", "c"):
        play(harness, task, 1.0, 1.0)
        harness.trainer.run_once()
    assert [row["task_id"] for row in tasks(harness)] == ["a", "c"]


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 64))
def test_no_history_makes_a_weight_zero(passes: list[bool], memory: int) -> None:
    rate = TaskRate("t")
    for passed in passes:
        rate = rate.plus(passed, memory)
    lowest = 4 * (memory + 1) / (memory + 2) ** 2
    assert lowest - ulps(len(passes) + 8, of=1.0, unit=FLOAT64) <= rate.weight <= 1.0
    assert rate.rollouts <= memory + ulps(len(passes) + 8, of=memory, unit=FLOAT64)


def test_as_many_groups_are_preferred_as_the_weight_says() -> None:
    number = 4000
    rates = TaskRates(CurriculumSettings(memory=MEMORY), [TaskRate("t", MEMORY, MEMORY)])
    preferred = sum(lot(f"session-{each}") < rates.weight("t") for each in range(number))
    deviation = (FLOOR * (1 - FLOOR) / number) ** 0.5
    assert abs(preferred / number - FLOOR) < 5 * deviation
