"""The trainer reports its backlog. Gateways admit only as many sessions as the trainer can train in time."""

import pytest

from tests.support.trainer_service.harness import Harness, MakeHarness


def wait(harness: Harness) -> None:
    """Run the trainer's loop once without a step, after a heartbeat that reports at once."""
    harness.heartbeat.note(harness.trainer.step, harness.trainer.version)
    assert not harness.trainer.run_once()


def said(harness: Harness, *names: str) -> list[float]:
    return [float(harness.stream.trainer[f"rollouts_{name}"]) for name in names]


def test_the_first_estimate_of_rollouts_per_step_is_min_live_rows(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(algorithm={"min_live_rows": 6}).start()
    wait(harness)
    assert said(harness, "waiting", "owed", "per_step") == [0, 0, 6]


def test_ended_sessions_wait_until_a_step_trains_them(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"min_live_rows": 4}).start()
    harness.agents.group("g", [1.0, 0.0])
    harness.agents.open("running")
    wait(harness)
    assert said(harness, "waiting") == [2]
    harness.agents.group("h", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert said(harness, "waiting", "owed") == [0, 0]


def test_rollouts_per_step_counts_groups_without_advantages(harness: Harness) -> None:
    harness.agents.group("equal", [1.0, 1.0, 1.0])
    harness.agents.group("live", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert said(harness, "per_step") == [
        pytest.approx((2 + 5) / 2)
    ]  # the mean of the first estimate and of what the step used


def test_rollouts_that_grow_too_old_are_no_part_of_the_trainers_pace(make_harness: MakeHarness) -> None:
    harness = make_harness(initial_version=9).start()
    harness.agents.group("old", [1.0, 0.0, 1.0, 0.0], version=0)
    harness.agents.group("live", [1.0, 0.0], version=9)
    assert harness.trainer.run_once()
    assert said(harness, "per_step") == [2], "otherwise a gateway admits as many again as were lost"


def test_trained_sessions_that_no_checkpoint_contains_are_owed(make_harness: MakeHarness) -> None:
    harness = make_harness(checkpoint_every_steps=2).start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert said(harness, "waiting", "owed") == [0, 2]
    harness.agents.group("h", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert said(harness, "owed") == [0]
