"""A deleted session leaves the trainer's memory at once, and its group does not wait for it."""

import gc
import sys
from typing import Any

import pytest

from rollout_queue.contract.records import Deletion, Outcome, Record, Reward, Turn
from rollout_queue.contract.stream import Entry
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from trainer_service.groups.assemble import Assembler, Rules

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
    gc.collect()
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


def test_a_group_goes_on_without_a_member_that_was_deleted(harness: Harness) -> None:
    harness.agents.episode("a", 1.0, group_id="g", size=3)
    harness.agents.episode("b", 0.0, group_id="g", size=3, output_ids=[12, 1])
    harness.agents.open("gone", "g", 3)
    harness.agents.call(turn("gone", "gone-t", group_id="g"))
    assert not harness.trainer.run_once()
    harness.agents.delete("gone")
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained"}
    assert not list(harness.stream.reclaim())
    assert harness.checkpoints.ledger(0, 10)[0].sessions == ["a", "b"]
    assert harness.stream.counts == {"session:deleted": 1, "session:trained": 2, "turn:trained": 2}


def test_a_member_that_was_deleted_before_its_group_trains_is_not_trained(harness: Harness) -> None:
    for session_id, value in (("a", 1.0), ("b", 0.0), ("gone", 5.0)):
        harness.agents.episode(session_id, value, group_id="g", size=4)
    assert not harness.trainer.run_once()
    harness.agents.delete("gone")
    assert not harness.trainer.run_once()
    harness.agents.episode("c", 0.5, group_id="g", size=4)
    assert harness.trainer.run_once()
    assert harness.checkpoints.ledger(0, 10)[0].sessions == ["a", "b", "c"]
    assert not list(harness.stream.reclaim())


def test_a_batch_that_waits_for_more_rows_loses_a_deleted_session(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"min_live_rows": 4}).start()
    harness.agents.group("g", [1.0, 0.0, 0.5])
    assert not harness.trainer.run_once()
    assert (
        "of which 2 are here" in harness.shared_state.snapshot.waiting_for
    )  # the third has the mean reward, and so no advantage
    before = turns_in_memory("g-0")
    harness.agents.delete("g-0")
    assert not harness.trainer.run_once()
    assert before > 0 == turns_in_memory("g-0")
    harness.agents.group("h", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert harness.checkpoints.ledger(0, 10)[0].sessions == ["g-1", "g-2", "h-0", "h-1"]


def test_a_deleted_member_still_counts_after_a_restart(harness: Harness) -> None:
    harness.agents.open("gone", "g", 3)
    harness.agents.call(turn("gone", "gone-t", group_id="g"))
    assert not harness.trainer.run_once()
    harness.agents.delete("gone")
    assert not harness.trainer.run_once()
    assert len(list(harness.stream.reclaim())) == 1
    harness = harness.restart()
    harness.agents.episode("a", 1.0, group_id="g", size=3)
    harness.agents.episode("b", 0.0, group_id="g", size=3, output_ids=[12, 1])
    assert harness.trainer.run_once()
    assert not list(harness.stream.reclaim())


@pytest.mark.parametrize("group_id", [None, "g"])
def test_a_deleted_session_without_other_members_is_acknowledged(
    harness: Harness, group_id: str | None
) -> None:
    harness.agents.open("alone", group_id, 1 if group_id else None)
    harness.agents.call(turn("alone", group_id=group_id))
    assert not harness.trainer.run_once()
    harness.agents.delete("alone")
    assert not harness.trainer.run_once()
    assert not list(harness.stream.reclaim())


def test_the_deletion_of_an_unknown_session_is_acknowledged(harness: Harness) -> None:
    harness.stream.append(deletion("nobody", None, None))
    assert not harness.trainer.run_once()
    assert not list(harness.stream.reclaim())


def test_the_deletion_of_a_trained_session_changes_nothing_and_is_acknowledged(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(checkpoint_every_steps=10).start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    harness.agents.delete("g-0")
    assert not harness.trainer.run_once()
    harness.save()
    assert harness.session_codes() == {"g-1": "trained"}
    assert harness.checkpoints.ledger(0, 10)[0].sessions == ["g-0", "g-1"]
    assert not list(harness.stream.reclaim())
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
    assert harness.checkpoints.ledger(0, 10)[0].sessions == ["g-1", "g-2"]
    assert not list(harness.stream.reclaim())


def test_a_deletion_that_arrives_during_a_step_does_not_change_the_step() -> None:
    assembler = Assembler(RULES)
    assembler.add([*episode("a", 1, 1.0), *episode("b", 4, 0.0), *episode("c", 7, 0.5)])
    (group,) = assembler.complete(caught_up=True)
    assembler.add([Entry("10-0", deletion("a"))])
    assembler.release(group)
    assert [member.reward for member in group.members] == [1.0, 0.0, 0.5]
    assert "10-0" in assembler.take_late_entries()
    assert not assembler.complete(caught_up=True)


@pytest.mark.parametrize("first", ["deletion", "turns"])
def test_a_deletion_may_come_before_or_after_the_records_that_it_deletes(first: str) -> None:
    deleted = [Entry("20-0", deletion("c"))]
    parts = [deleted, episode("c", 7, 9.0)] if first == "deletion" else [episode("c", 7, 9.0), deleted]
    assembler = Assembler(RULES)
    assembler.add([entry for part in parts for entry in part])
    assert sorted(assembler.take_freed_entries()) == ["7-0", "8-0", "9-0"]
    assert not assembler.complete(caught_up=True)
    assembler.add([*episode("a", 1, 1.0), *episode("b", 4, 0.0)])
    (group,) = assembler.complete(caught_up=True)
    assert [(member.session_id, member.reward) for member in group.members] == [
        ("a", 1.0), ("b", 0.0), ("c", None),
    ]  # fmt: skip
    assert group.members[2].entry_ids == ("20-0",)
