"""The loop on a stream in memory: which groups are trained, when entries are acknowledged, and crashes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_queue.contract.stream import Verdicts
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.turned_clock import TurnedClock
from trainer_service.status.heartbeat import Stopped
from trainer_service.step.group_trainer import Diverged
from trainer_service.storage.checkpoint import CURRENT
from trainer_service.storage.files import write_atomically


class Crash(Exception):
    """The process dies here."""


def crash(*_: object, **__: object) -> None:
    raise Crash


def crash_at_current(path: Path, content: bytes) -> None:
    """The process dies just before it moves CURRENT; everything else is written."""
    if path.name == CURRENT:
        raise Crash
    write_atomically(path, content)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_group_trains_when_its_last_member_ends(harness: Harness) -> None:
    harness.agents.episode("a", 1.0, group_id="g", size=2)
    assert not harness.trainer.run_once()
    assert harness.session_codes() == {"a": None}
    harness.agents.episode("b", 0.0, group_id="g", size=2, output_ids=[12, 1])
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained"}
    verdict = harness.stream.heads["a"].verdict
    assert verdict is not None
    assert (verdict.step, verdict.version) == (1, 1)
    assert harness.stream.heads["a"].turn_verdicts["a-t"].code == "trained"
    assert not list(harness.stream.reclaim())


def test_training_makes_rewarded_tokens_likelier(make_harness: MakeHarness) -> None:
    harness = make_harness(optimizer={"lr": 1e-3, "warmup_steps": 0}).start()
    before = harness.weights()
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    assert not same(before, harness.weights())
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
    assert len(list(harness.stream.reclaim())) == 6
    again = harness.restart()
    assert not again.trainer.run_once()
    assert same(trained, again.weights())
    assert (again.trainer.step, again.trainer.version) == (1, 1)
    assert set(again.session_codes().values()) == {"trained"}
    assert not list(harness.stream.reclaim())
    assert [row.step for row in again.checkpoints.ledger(0, 10)] == [1]


def test_a_crash_after_the_acknowledgement_counts_nothing_twice(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    harness.restart()
    assert harness.stream.counts["session:trained"] == 2


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
    assert same(durable, again.weights())
    assert again.trainer.run_once()
    assert same(lost, again.weights())
    assert again.session_codes()["h-0"] == "trained"
    assert [(row.step, row.turns) for row in again.checkpoints.ledger(0, 10)] == [
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
    assert same(straight.weights(), broken.weights())


def test_equal_rewards_and_single_rollouts_end_with_zero_advantage(harness: Harness) -> None:
    harness.agents.group("g", [1.0, 1.0])
    harness.agents.episode("alone", 1.0)
    assert not harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"zero_advantage"}
    alone = harness.stream.heads["alone"].verdict
    assert alone is not None
    assert alone.detail == "singleton group"
    assert not list(harness.stream.reclaim())


def test_rollouts_of_a_version_too_old_are_stale(make_harness: MakeHarness) -> None:
    harness = make_harness(initial_version=9, algorithm={"max_staleness": 8}).start()
    harness.agents.group("old", [1.0, 0.0], version=0)
    harness.agents.group("edge", [1.0, 0.0], version=1)
    harness.trainer.run_once()
    codes = harness.session_codes()
    assert (codes["old-0"], codes["edge-0"]) == ("stale", "trained")


def test_a_group_goes_on_without_members_that_failed(harness: Harness) -> None:
    harness.agents.episode("a", 1.0, group_id="g", size=4)
    harness.agents.episode("b", 0.0, group_id="g", size=4, output_ids=[12, 1])
    harness.agents.open("c", "g", 4)
    harness.agents.finish("c", status="failed")
    harness.agents.open("d", "g", 4)
    harness.agents.call(turn("d", "d-t"))
    harness.agents.finish("d", status="truncated")
    assert harness.trainer.run_once()
    assert harness.session_codes() == {"a": "trained", "b": "trained", "c": None, "d": "truncated"}
    assert not list(harness.stream.reclaim())


def test_an_ended_member_still_counts_after_a_restart(harness: Harness) -> None:
    harness.agents.open("c", "g", 3)
    harness.agents.finish("c", status="failed")
    assert not harness.trainer.run_once()
    harness = harness.restart()
    harness.agents.episode("a", 1.0, group_id="g", size=3)
    harness.agents.episode("b", 0.0, group_id="g", size=3, output_ids=[12, 1])
    assert harness.trainer.run_once()


def test_sessions_wait_until_enough_rows_have_an_advantage(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.status.heartbeat.REPORT_EVERY_S", 0.0)
    harness = make_harness(algorithm={"min_live_rows": 4}).start()
    harness.agents.group("g", [1.0, 0.0])
    assert not harness.trainer.run_once()
    assert "4 rows with an advantage, of which 2 are here" in harness.shared_state.snapshot.waiting_for
    assert harness.stream.trainer["waiting_for"] == harness.shared_state.snapshot.waiting_for
    harness.agents.group("h", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"trained"}


def test_the_last_rows_are_trained_when_the_stream_is_silent(
    make_harness: MakeHarness, stopped: TurnedClock
) -> None:
    harness = make_harness(algorithm={"min_live_rows": 100, "flush_after_s": 60.0}).start()
    harness.agents.group("g", [1.0, 0.0])
    assert not harness.trainer.run_once()
    stopped.turn(61)
    assert harness.trainer.run_once()


def test_a_paused_trainer_makes_no_step(harness: Harness) -> None:
    harness.agents.group("g", [1.0, 0.0])
    harness.shared_state.pause()
    assert not harness.trainer.run_once()
    assert harness.shared_state.snapshot.state == "paused"
    harness.shared_state.resume()
    assert harness.trainer.run_once()


def test_a_requested_checkpoint_makes_steps_durable(make_harness: MakeHarness) -> None:
    harness = make_harness(checkpoint_every_steps=10).start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert harness.session_codes()["g-0"] is None
    wish = harness.shared_state.request_checkpoint()
    harness.trainer.run_once()
    assert wish.result(0).step == 1
    assert harness.session_codes()["g-0"] == "trained"
    assert [row.step for row in harness.checkpoints.ledger(0, 10)] == [1]


def test_a_requested_checkpoint_is_written_even_if_the_caller_no_longer_waits(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(checkpoint_every_steps=10).start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    harness.shared_state.request_checkpoint().cancel()  # as the HTTP thread does after its timeout
    assert not harness.trainer.run_once()
    assert harness.session_codes()["g-0"] == "trained"


def test_a_gradient_that_diverges_in_a_later_epoch_ends_the_run(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(algorithm={"epochs": 2}).start()
    norms = iter([1.0, float("inf")])
    monkeypatch.setattr(harness.policy, "step", lambda scale=1.0: next(norms))
    harness.agents.group("g", [1.0, 0.0])
    with pytest.raises(Diverged):
        harness.trainer.run_once()
    assert harness.checkpoints.ledger(0, 10) == []


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


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_restart_uses_the_present_learning_rate(make_harness: MakeHarness, zero_stage: int) -> None:
    """An operator may lower the rate after an alarm. A rate of 0 leaves every weight as it is."""
    harness = make_harness(zero_stage=zero_stage).start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    before = published(harness)
    harness.settings = harness.settings.model_copy(
        update={"optimizer": harness.settings.optimizer.model_copy(update={"lr": 0.0})}
    )
    again = harness.restart()
    again.agents.group("h", [1.0, 0.0], version=1)
    assert again.trainer.run_once()
    assert published(again) == before


def published(harness: Harness) -> bytes:
    """The newest version's weights, as they are served."""
    newest = max(int(path.name[1:]) for path in harness.settings.policies_dir.glob("v*"))
    (path,) = harness.settings.policies_dir.glob(f"v{newest:08d}/*.safetensors")
    return path.read_bytes()


def test_a_step_is_reported_although_its_version_waits_for_a_gateway(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    harness.gateway.away = True
    harness.agents.group("h", [1.0, 0.0], version=1)
    harness.shared_state.stop()
    with pytest.raises(Stopped):
        harness.trainer.run_once()
    told = (harness.root / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in told] == [1, 2]
