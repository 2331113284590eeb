"""Checkpoints are written while the training goes on, and contain the moment at which they began."""

from typing import Any

import pytest
from torch import Tensor

from tests.support.long_cases import cases
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.publications import LateExecutor
from tests.support.trainer_service.same_training import differs_by
from tests.support.turned_clock import TurnedClock
from trainer_service.storage.checkpoint_cycle import CHEAP

LORA = {"rank": 2}
BY_TIME: dict[str, Any] = {"checkpoint_every_steps": None}


def steps_in_checkpoints(harness: Harness) -> list[int]:
    return [row.step for row in harness.checkpoints.ledger(0, 100)]


def writes_for(harness: Harness, stopped: TurnedClock, seconds: float) -> None:
    """Let each checkpoint take so long."""
    write = harness.checkpoints.write

    def writing(*arguments: Any) -> str:
        stopped.turn(seconds)
        return write(*arguments)

    harness.checkpoints.write = writing  # type: ignore[assignment, method-assign]


def exported(harness: Harness) -> dict[str, Tensor]:
    return {each.name: each.value.clone() for each in harness.policy.snapshot().tensors}


@pytest.mark.parametrize(
    "options",
    cases(
        [{"zero_stage": 1}, {"zero_stage": 3}, {"lora": LORA}], long=[{"zero_stage": 0}, {"zero_stage": 2}]
    ),
    ids=str,
)
def test_a_checkpoint_has_the_weights_and_the_position_of_its_beginning(
    make_harness: MakeHarness, options: dict[str, Any]
) -> None:
    harness = make_harness(writer=LateExecutor(3), checkpoint_every_steps=2, **options).start()
    harness.step("a")
    harness.step("b")
    weights, then = exported(harness), harness.trainer.version
    harness.step("c")
    assert steps_in_checkpoints(harness) == []
    assert harness.session_codes()["a-0"] is None
    harness.trainer.run_once()
    assert steps_in_checkpoints(harness) == [1, 2]
    assert [harness.session_codes()[name] for name in ("a-0", "b-0", "c-0")] == ["trained", "trained", None]
    again = harness.restart()
    assert (again.trainer.step, again.trainer.version) == (2, then)
    assert differs_by(exported(again), weights) == 0
    assert again.trainer.run_once()
    assert again.trainer.step == 3


def test_a_small_model_has_a_checkpoint_whenever_one_costs_little(
    make_harness: MakeHarness, stopped: TurnedClock
) -> None:
    harness = make_harness(**BY_TIME).start()
    writes_for(harness, stopped, 10)
    harness.step("a")
    assert steps_in_checkpoints(harness) == [1]
    stopped.turn(10 / CHEAP - 11)
    harness.step("b")
    assert steps_in_checkpoints(harness) == [1]
    stopped.turn(2)
    harness.trainer.run_once()  # no new step is needed
    assert steps_in_checkpoints(harness) == [1, 2]
    assert set(harness.session_codes().values()) == {"trained"}


def test_a_large_model_has_a_checkpoint_after_some_minutes(
    make_harness: MakeHarness, stopped: TurnedClock
) -> None:
    harness = make_harness(checkpoint_every_minutes=5, **BY_TIME).start()
    writes_for(harness, stopped, 60)
    harness.step("a")
    stopped.turn(239)
    harness.step("b")
    assert steps_in_checkpoints(harness) == [1]
    stopped.turn(2)
    harness.trainer.run_once()
    assert steps_in_checkpoints(harness) == [1, 2]


def test_entries_that_come_late_wait_for_the_checkpoint_of_their_session(make_harness: MakeHarness) -> None:
    harness = make_harness(writer=LateExecutor(4)).start()
    harness.step("a")
    harness.agents.reward("a-0", 1.0, key="late")
    harness.trainer.run_once()
    assert len(list(harness.stream.reclaim())) == 7
    for _ in range(3):
        harness.trainer.run_once()
    assert not list(harness.stream.reclaim())


def test_a_requested_checkpoint_is_durable_when_the_request_is_answered(make_harness: MakeHarness) -> None:
    harness = make_harness(writer=LateExecutor(100), checkpoint_every_steps=10).start()
    harness.step("a")
    assert steps_in_checkpoints(harness) == []
    harness.save()
    assert steps_in_checkpoints(harness) == [1]


def test_evaluations_alone_make_no_checkpoint_before_the_end(
    make_harness: MakeHarness, turned: TurnedClock
) -> None:
    harness = make_harness(**BY_TIME).start()
    harness.step("a")
    current = harness.settings.checkpoint_dir / "CURRENT"
    before = current.read_text()
    harness.agents.evaluate("e", 1.0, version=1)
    turned.turn(1e6)
    harness.trainer.run_once()
    assert current.read_text() == before
    harness.save()
    assert harness.restart().intake.evaluations.state().scores[-1].rewarded == 1
