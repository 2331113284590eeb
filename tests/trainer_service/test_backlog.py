"""What the trainer says of the work ahead: by it the gateways admit as much as is trained in time."""

import pytest

from tests.support.trainer_service.rig import MakeRig, Rig


def wait(rig: Rig) -> None:
    """A turn of the loop without a step, whose beat reports however soon after the last it comes."""
    rig.heartbeat.note(rig.trainer.step, rig.trainer.version)
    assert not rig.trainer.run_once()


def said(rig: Rig, *names: str) -> list[float]:
    return [float(rig.stream.trainer[f"rollouts_{name}"]) for name in names]


def test_before_the_first_step_one_is_expected_to_take_what_it_needs_at_least(make_rig: MakeRig) -> None:
    rig = make_rig(algorithm={"min_live_rows": 6}).start()
    wait(rig)
    assert said(rig, "waiting", "owed", "per_step") == [0, 0, 6]


def test_what_has_ended_waits_until_a_step_takes_it(make_rig: MakeRig) -> None:
    rig = make_rig(algorithm={"min_live_rows": 4}).start()
    rig.agents.group("g", [1.0, 0.0])
    rig.agents.open("running")
    wait(rig)
    assert said(rig, "waiting") == [2]
    rig.agents.group("h", [1.0, 0.0])
    assert rig.trainer.run_once()
    assert said(rig, "waiting", "owed") == [0, 0]


def test_the_use_of_a_step_counts_what_taught_nothing(rig: Rig) -> None:
    rig.agents.group("equal", [1.0, 1.0, 1.0])
    rig.agents.group("live", [1.0, 0.0])
    assert rig.trainer.run_once()
    assert said(rig, "per_step") == [pytest.approx((2 + 5) / 2)]  # the guess before it, and what it used


def test_what_no_checkpoint_contains_yet_is_owed(make_rig: MakeRig) -> None:
    rig = make_rig(checkpoint_every_steps=2).start()
    rig.agents.group("g", [1.0, 0.0])
    assert rig.trainer.run_once()
    assert said(rig, "waiting", "owed") == [0, 2]
    rig.agents.group("h", [1.0, 0.0])
    assert rig.trainer.run_once()
    assert said(rig, "owed") == [0]
