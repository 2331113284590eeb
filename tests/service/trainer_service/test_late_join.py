"""A session that got its group after its first call is trained with the group, with all of its turns."""

import asyncio

from rollout_queue.contract.records import SessionSpec
from tests.support.trainer_service.harness import Harness, MakeHarness, turn


def late(harness: Harness, session_id: str, task_id: str | None = None) -> None:
    """A session that a call opened, and that got the group `g` of three after its first turn."""
    spec = SessionSpec(session_id=session_id, created_at=100.0, implicit=True)
    asyncio.run(harness.stream.open_session(spec))
    harness.agents.call(turn(session_id, f"{session_id}-t", output_ids=[15, 1]))
    asked = SessionSpec(session_id=session_id, created_at=100.0, group_id="g", group_size=3, task_id=task_id)
    assert asyncio.run(harness.stream.describe_session(asked, 102.0)) == asked


def pair(harness: Harness) -> None:
    for name, value, output in (("a", 1.0, 11), ("b", 0.0, 12)):
        harness.agents.episode(name, value, group_id="g", size=3, output_ids=[output, 1])


def test_its_group_waits_for_it_and_is_trained_with_it(make_harness: MakeHarness) -> None:
    """Without the late join, the group would go on after `group_wait_s`: no other record names it."""
    harness = make_harness(algorithm={"group_wait_s": 1.0}).start()
    late(harness, "late")
    pair(harness)
    assert not harness.trainer.run_once()
    harness.agents.finish("late", 0.5)
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained", "late": "trained"}
    assert harness.checkpoints.ledger(0, 10)[0].sessions == ["a", "b", "late"]
    assert not list(harness.stream.reclaim())


def test_a_trainer_that_starts_again_knows_its_group(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"group_wait_s": 1.0}).start()
    late(harness, "late")
    pair(harness)
    assert not harness.trainer.run_once()
    harness = harness.restart()
    assert not harness.trainer.run_once()
    harness.agents.finish("late", 0.5)
    assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_session_that_is_deleted_after_it_joined_counts_as_a_member(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    late(harness, "late")
    pair(harness)
    assert not harness.trainer.run_once()
    harness.agents.delete("late")
    assert harness.trainer.run_once()
    assert harness.checkpoints.ledger(0, 10)[0].sessions == ["a", "b"]


def test_its_task_counts_although_its_turns_do_not_name_it(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"curriculum": {"memory": 8}}).start()
    for name, value in (("a", 1.0), ("b", 0.0), ("c", 0.5)):
        late(harness, name, "sums")
        harness.agents.finish(name, value)
    assert harness.trainer.run_once()
    assert [each.task_id for each in harness.shared_state.tasks] == ["sums"]
