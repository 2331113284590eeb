"""The loop on a stream in memory: which groups are trained, when checkpoints are made and entries
acknowledged, and crashes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout_queue.contract.stream import Verdicts
from tests.support.long_cases import cases
from tests.support.trainer_service.crash import Crash, crash
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.trainer_service.publications import InlineExecutor, LateExecutor
from tests.support.trainer_service.same_training import differs_by
from tests.support.turned_clock import TurnedClock
from trainer_service.storage.checkpoint import CURRENT
from trainer_service.storage.checkpoint_cycle import CHEAP
from trainer_service.storage.durable_files import write_atomically


def crash_at_current(path: Path, content: bytes) -> None:
    """The process dies just before it moves CURRENT; everything else is written."""
    if path.name == CURRENT:
        raise Crash
    write_atomically(path, content)


def test_a_group_trains_when_its_last_member_ends(harness: Harness) -> None:
    harness.agents.episode("a", 1.0, group_id="g", size=2)
    assert not harness.trainer.run_once()
    assert harness.session_codes() == {"a": None}
    harness.agents.episode("b", 0.0, group_id="g", size=2, output_ids=[12, 1])
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained"}
    verdict = harness.verdict("a")
    assert (verdict.step, verdict.version) == (1, 1)
    assert harness.stream.heads["a"].turn_verdicts["a-t"].code == "trained"
    assert not harness.pending


def test_training_makes_rewarded_tokens_likelier(make_harness: MakeHarness) -> None:
    harness = make_harness(optimizer={"lr": 1e-3, "warmup_steps": 0}).start()
    before = harness.weights()
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    assert differs_by(before, harness.weights()) > 0
    rewarded, unrewarded = (_last_logprob(harness, [2, 3, 4, 10 + i]) for i in range(2))
    assert rewarded > unrewarded + 0.01


def _last_logprob(harness: Harness, ids: list[int]) -> float:
    with torch.no_grad():
        logits = harness.policy.module(torch.tensor([ids])).logits[0, -2]
    return float(logits.log_softmax(-1)[ids[-1]])


def test_nothing_is_acknowledged_before_its_checkpoint(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    write, acknowledge = harness.checkpoints.write, harness.stream.acknowledge

    def writing(*arguments: Any) -> str:
        events.append("checkpoint")
        return write(*arguments)

    def acknowledging(entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        events.append("acknowledge")
        acknowledge(entry_ids, verdicts)

    monkeypatch.setattr(harness.checkpoints, "write", writing)
    monkeypatch.setattr(harness.stream, "acknowledge", acknowledging)
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    assert events == ["checkpoint", "acknowledge"]


def test_a_crash_after_the_checkpoint_trains_nothing_twice(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.agents.group("g", [1.0, 0.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.stream, "acknowledge", crash)
        with pytest.raises(Crash):
            harness.trainer.run_once()
    trained = harness.weights()
    assert len(harness.pending) == 6
    again = harness.restart()
    assert not again.trainer.run_once()
    assert differs_by(trained, again.weights()) == 0
    assert (again.trainer.step, again.trainer.version) == (1, 1)
    assert set(again.session_codes().values()) == {"trained"}
    assert not harness.pending
    assert [row.step for row in again.ledger] == [1]
    again.restart()
    assert harness.stream.counts["session:trained"] == 2, "nothing counts twice"


def test_a_crash_before_the_checkpoint_trains_again_from_the_old_weights(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    durable = harness.weights()
    harness.agents.group("h", [0.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer_service.storage.checkpoint.write_atomically", crash_at_current)
        with pytest.raises(Crash):
            harness.trainer.run_once()
    assert harness.session_codes()["h-0"] is None
    lost = harness.weights()
    again = harness.restart()
    assert differs_by(durable, again.weights()) == 0
    assert again.trainer.run_once()
    assert differs_by(lost, again.weights()) == 0
    assert again.session_codes()["h-0"] == "trained"
    assert [(row.step, row.turns) for row in again.ledger] == [
        (1, ["g-0-t", "g-1-t"]),
        (2, ["h-0-t", "h-1-t"]),
    ]


def test_a_restored_run_ends_bitwise_where_an_uninterrupted_one_does(make_harness: MakeHarness) -> None:
    groups = {"a": [1.0, 0.0], "b": [0.0, 1.0, 1.0], "c": [0.5, 0.0]}
    straight, broken = make_harness("straight").start(), make_harness("broken").start()
    for group_id, values in groups.items():
        straight.agents.group(group_id, values)
        straight.trainer.run_once()
        broken.agents.group(group_id, values)
        broken.trainer.run_once()
        broken = broken.restart()
    assert straight.trainer.step == broken.trainer.step == 3
    assert differs_by(straight.weights(), broken.weights()) == 0


def test_equal_rewards_and_single_rollouts_end_with_zero_advantage(harness: Harness) -> None:
    harness.agents.group("g", [1.0, 1.0])
    harness.agents.episode("alone", 1.0)
    assert not harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"zero_advantage"}
    alone = harness.stream.heads["alone"].verdict
    assert alone is not None
    assert alone.detail == "singleton group"
    assert not harness.pending


def test_rollouts_of_a_version_too_old_are_stale(make_harness: MakeHarness) -> None:
    """They count as dropped, not as a group of equal rewards. They are no part of the trainer's pace, or
    gateways would admit as many again as were lost."""
    harness = make_harness(initial_version=9, algorithm={"max_staleness": 8}).start()
    harness.agents.group("old", [1.0, 0.0], version=0)
    harness.step("edge", version=1)
    codes = harness.session_codes()
    assert (codes["old-0"], codes["edge-0"]) == ("stale", "trained")
    assert [harness.told[f"group/{name}"] for name in ("live", "zero_var", "dropped")] == [1, 0, 2]
    assert float(harness.stream.trainer["rollouts_per_step"]) == 2


@pytest.mark.parametrize("restarted", [False, True])
def test_a_group_goes_on_without_members_that_failed(harness: Harness, restarted: bool) -> None:
    harness.agents.open("c", "g", 4)
    harness.agents.finish("c", status="failed")
    harness.agents.open("d", "g", 4)
    harness.agents.call(turn("d", "d-t"))
    harness.agents.finish("d", status="truncated")
    assert not harness.trainer.run_once()
    if restarted:
        harness = harness.restart()
    harness.agents.episode("a", 1.0, group_id="g", size=4)
    harness.agents.episode("b", 0.0, group_id="g", size=4, output_ids=[12, 1])
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained", "c": None, "d": "truncated"}
    assert not harness.pending


def test_sessions_wait_until_enough_rows_have_an_advantage(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.heartbeat.REPORT_EVERY_S", 0.0)
    harness = make_harness(algorithm={"min_live_rows": 4}).start()
    harness.agents.group("g", [1.0, 0.0])
    assert not harness.trainer.run_once()
    rows = "4 rows with an advantage, of which 2 are here"
    assert harness.waits_for == f"{rows}; of the sessions read, 2 have ended", (
        "what nobody waits for is left out"
    )
    assert harness.stream.trainer["waiting_for"] == harness.waits_for
    harness.step("h")
    assert set(harness.session_codes().values()) == {"trained"}


def test_the_last_rows_are_trained_in_silence(make_harness: MakeHarness, stopped: TurnedClock) -> None:
    harness = make_harness(algorithm={"min_live_rows": 100, "flush_after_s": 60.0}).start()
    harness.agents.group("g", [1.0, 0.0])
    assert not harness.trainer.run_once()
    stopped.turn(61)
    assert harness.trainer.run_once()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_requested_checkpoint_makes_steps_durable(make_harness: MakeHarness, is_awaited: bool) -> None:
    writer = LateExecutor(100) if is_awaited else InlineExecutor()
    harness = make_harness(checkpoint_every_steps=10, writer=writer).start()
    harness.step("g")
    assert harness.session_codes()["g-0"] is None
    wish = harness.shared_state.request_checkpoint()
    if not is_awaited:
        wish.cancel()  # as the HTTP thread does after its timeout
    assert not harness.trainer.run_once()
    assert not is_awaited or wish.result(0).step == 1
    assert harness.session_codes()["g-0"] == "trained"
    assert [row.step for row in harness.ledger] == [1]


def test_the_end_of_a_run_leaves_a_checkpoint_of_every_step(make_harness: MakeHarness) -> None:
    harness = make_harness(checkpoint_every_steps=10)
    harness.agents.group("g", [1.0, 0.0])
    turn_of_the_loop = harness.trainer.run_once

    def last() -> bool:
        harness.shared_state.stop()
        return turn_of_the_loop()

    harness.trainer.run_once = last  # type: ignore[method-assign]
    harness.trainer.run()
    assert set(harness.session_codes().values()) == {"trained"}
    assert harness.restart().trainer.step == 1


def test_a_trainer_reports_its_status_after_a_step(harness: Harness) -> None:
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    said = harness.stream.trainer
    assert (said["state"], said["step"], said["version"]) == ("waiting", "1", "1")
    assert json.loads(str(said["metrics"]))["reward_mean"] == 0.5
    assert harness.registry.get_sample_value("weir_trainer_mismatch_abs_logp") is not None
    assert harness.registry.get_sample_value("weir_trainer_sessions_total", {"verdict": "trained"}) == 2


@pytest.mark.parametrize("zero_stage", cases([1, 3], long=[0]))
def test_a_restart_uses_the_present_learning_rate(make_harness: MakeHarness, zero_stage: int) -> None:
    """An operator may lower the rate after an alarm. A rate of 0 leaves every weight as it is."""
    harness = make_harness(zero_stage=zero_stage).start()
    harness.step("g")
    before = published(harness)
    harness.settings = harness.settings.model_copy(
        update={"optimizer": harness.settings.optimizer.model_copy(update={"lr": 0.0})}
    )
    again = harness.restart()
    again.step("h", version=1)
    assert published(again) == before


def published(harness: Harness) -> bytes:
    """The newest version's weights, as they are served."""
    newest = max(int(path.name[1:]) for path in harness.settings.policies_dir.glob("v*"))
    (path,) = harness.settings.policies_dir.glob(f"v{newest:08d}/*.safetensors")
    return path.read_bytes()


LORA = {"rank": 2}
BY_TIME: dict[str, Any] = {"checkpoint_every_steps": None}


def steps_in_checkpoints(harness: Harness) -> list[int]:
    return [row.step for row in harness.ledger]


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


@pytest.mark.parametrize(
    ("given", "write_s", "until_s"),
    [({}, 10, 10 / CHEAP), ({"checkpoint_every_minutes": 5}, 60, 300)],
    ids=["a small model, whenever one costs little", "a large model, after some minutes"],
)
def test_a_checkpoint_comes_by_time(
    make_harness: MakeHarness, stopped: TurnedClock, given: dict[str, Any], write_s: float, until_s: float
) -> None:
    harness = make_harness(**given, **BY_TIME).start()
    writes_for(harness, stopped, write_s)
    harness.step("a")
    assert steps_in_checkpoints(harness) == [1]
    stopped.turn(until_s - write_s - 1)
    harness.step("b")
    assert steps_in_checkpoints(harness) == [1]
    stopped.turn(2)
    harness.trainer.run_once()  # no new step is needed
    assert steps_in_checkpoints(harness) == [1, 2]
    assert set(harness.session_codes().values()) == {"trained"}


def test_entries_that_come_late_wait_for_the_checkpoint_of_their_session(make_harness: MakeHarness) -> None:
    harness = make_harness(writer=LateExecutor(4)).start()
    harness.step("a")
    harness.agents.reward("a-0", 1.0, key="late")
    harness.trainer.run_once()
    assert len(harness.pending) == 7
    for _ in range(3):
        harness.trainer.run_once()
    assert not harness.pending


def test_evaluations_alone_make_no_checkpoint(make_harness: MakeHarness, turned: TurnedClock) -> None:
    harness = make_harness(**BY_TIME).start()
    harness.step("a")
    current = harness.settings.checkpoint_dir / "CURRENT"
    before = current.read_text()
    harness.agents.evaluate("e", 1.0, version=1)
    turned.turn(1e6)
    harness.trainer.run_once()
    assert current.read_text() == before
    harness.save()
    assert harness.restart().intake.evaluations.state.scores[-1].rewarded == 1
