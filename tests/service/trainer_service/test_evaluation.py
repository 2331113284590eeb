"""Evaluation during training: sessions that are never trained score each version."""

import asyncio
import json
from pathlib import Path

import pytest

from rollout_queue.contract.records import SessionSpec
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.trainer_service.metric_files import curve, lines


def sample(harness: Harness, name: str, **labels: str) -> float | None:
    value: float | None = harness.registry.get_sample_value(f"weir_trainer_{name}", labels)
    return value


def told(harness: Harness) -> dict[str, float]:
    metrics: dict[str, float] = (
        harness.shared_state.snapshot.metrics | harness.shared_state.snapshot.evaluations
    )
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}


def test_a_score_is_reported_at_the_step_that_made_its_version(make_harness: MakeHarness) -> None:
    harness = make_harness(initial_version=7).start()
    harness.step("g", version=7)
    harness.step("h", version=8)
    for number, value in enumerate([1.0, 0.5, 0.0]):
        harness.agents.evaluate(f"e{number}", value, version=8)
    harness.agents.evaluate("first", 0.25, version=7)
    assert not harness.trainer.run_once()
    assert told(harness) == {
        "eval/8/rewarded": 3, "eval/8/unrewarded": 0, "eval/8/failed": 0, "eval/8/reward": 0.5,
        "eval/7/rewarded": 1, "eval/7/unrewarded": 0, "eval/7/failed": 0, "eval/7/reward": 0.25,
    }  # fmt: skip
    assert json.loads(str(harness.stream.trainer["metrics"])).items() >= told(harness).items()
    assert (sample(harness, "eval_reward", version="8"), sample(harness, "eval_reward", version="7")) == (
        0.5,
        0.25,
    )
    written = lines(harness.root / "metrics.eval.jsonl")
    assert [(line["step"], line["version"], line["eval/reward"]) for line in written] == [
        (1, 8, 0.5),
        (0, 7, 0.25),
    ]
    assert curve(harness.root / "tensorboard", "eval/reward") == [(1, 0.5), (0, 0.25)]
    assert {harness.session_codes()[name] for name in ("e0", "e1", "e2", "first")} == {"not_for_training"}


def test_missing_rewards_and_failures_do_not_change_the_mean_reward(harness: Harness) -> None:
    harness.agents.evaluate("a", 0.75)
    harness.agents.evaluate("b", None)
    harness.agents.evaluate("c", -1.0, status="failed")
    harness.agents.evaluate("d", 0.25, status="truncated")
    harness.trainer.run_once()
    assert told(harness) == {
        "eval/0/rewarded": 2, "eval/0/unrewarded": 1, "eval/0/failed": 1, "eval/0/reward": 0.5
    }  # fmt: skip
    counts = {
        end: sample(harness, "eval_sessions", version="0", end=end)
        for end in ("rewarded", "unrewarded", "failed")
    }
    assert counts == {"rewarded": 2, "unrewarded": 1, "failed": 1}


def test_a_version_without_rewards_has_no_mean_reward(harness: Harness) -> None:
    harness.agents.evaluate("a", None)
    harness.trainer.run_once()
    assert told(harness) == {"eval/0/rewarded": 0, "eval/0/unrewarded": 1, "eval/0/failed": 0}
    assert sample(harness, "eval_reward", version="0") is None


def test_evaluations_do_not_change_metrics_of_the_training(harness: Harness) -> None:
    harness.agents.evaluate("a", 100.0)
    harness.agents.evaluate("b", 100.0, status="truncated")
    harness.step("g")
    values = lines(harness.root / "metrics.jsonl")[0]
    assert (values["reward_mean"], values["rollouts"], values["len/truncated"]) == (0.5, 2, 0)
    assert (values["group/live"], values["group/singleton"], values["group/dropped"]) == (1, 0, 0)


def test_a_session_whose_calls_named_a_version_is_an_evaluation(
    harness: Harness,
) -> None:
    """Only the call was pinned to a version; the session was opened as an ordinary one."""
    for name, value in (("a", 1.0), ("b", 0.0)):
        harness.agents.open(name, "g", 2)
        harness.agents.call(turn(name, f"{name}-t", policy="policy@3", version=3))
        harness.agents.finish(name, value)
    assert not harness.trainer.run_once()
    assert harness.session_codes() == {"a": "not_for_training", "b": "not_for_training"}
    assert harness.stream.heads["a"].turn_verdicts["a-t"].code == "not_for_training"
    assert told(harness)["eval/3/reward"] == 0.5
    assert not list(harness.stream.reclaim())


def test_a_session_that_two_versions_sampled_counts_for_the_one_that_sampled_more(
    harness: Harness,
) -> None:
    asyncio.run(harness.stream.open_session(SessionSpec(session_id="a", train=False, created_at=100.0)))
    first = turn("a", "t1", version=4, output_ids=[10, 1])
    second = turn("a", "t2", version=5, output_ids=[11, 12, 1], parent_id="t1", context_ids=[5])
    harness.agents.call(first, second)
    harness.agents.finish("a", 1.0, train=False)
    harness.trainer.run_once()
    assert told(harness)["eval/5/rewarded"] == 1
    assert "eval/4/rewarded" not in told(harness)


def test_only_the_last_versions_keep_their_scores(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_service.groups.evaluation.VERSIONS_KEPT", 2)
    for version in range(4):
        harness.agents.evaluate(f"e{version}", float(version) or None, version=version)
        harness.trainer.run_once()
    found = [sample(harness, "eval_reward", version=str(version)) for version in range(4)]
    assert found == [None, None, 2.0, 3.0]
    assert {name.split("/")[1] for name in told(harness)} == {"2", "3"}


def test_a_restart_goes_on_counting(harness: Harness) -> None:
    harness.agents.evaluate("a", 1.0)
    harness.step("g")
    again = harness.restart()
    assert told(again)["eval/0/reward"] == sample(again, "eval_reward", version="0") == 1.0
    again.agents.evaluate("b", 0.0)
    again.agents.evaluate("c", 0.5, version=1)
    again.trainer.run_once()
    assert told(again)["eval/0/reward"] == 0.5
    assert _places(harness.root / "metrics.eval.jsonl") == [(0, 0), (0, 0), (1, 1)]


def _places(path: Path) -> list[tuple[int, int]]:
    return [(line["step"], line["version"]) for line in lines(path)]


def test_relations_of_trained_turns_are_counted(harness: Harness) -> None:
    relations = [
        ("t1", "root", None),
        ("t2", "extends", "t1"),
        ("t3", "rerendered", "t2"),
        ("t4", "forks", "t2"),
    ]
    for name, value in (("a", 1.0), ("b", 0.0)):
        harness.agents.open(name, "g", 2)
        for at, (suffix, relation, parent) in enumerate(relations):
            parent_id = parent and f"{name}-{parent}"
            where = {"relation": relation, "parent_id": parent_id, "started_at": 100.0 + at}
            harness.agents.call(turn(name, f"{name}-{suffix}", context_ids=[2 + at], **where))
        aborted = {"finish": "abort", "relation": "extends", "parent_id": f"{name}-t2"}
        harness.agents.call(turn(name, f"{name}-t5", context_ids=[9], **aborted))
        harness.agents.finish(name, value)
    assert harness.trainer.run_once()
    values = lines(harness.root / "metrics.jsonl")[0]
    assert [values[f"drift/{name}"] for name in ("clean", "realign", "fork")] == [2, 2, 2]


def test_scores_survive_a_clean_stop_after_the_last_step(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    harness.agents.group("g", [1.0, 0.0])
    turn_of = harness.trainer.run_once

    def until_it_is_evaluated() -> bool:
        made = turn_of()
        if made:
            harness.agents.evaluate("late", 1.0)
        elif told(harness):
            harness.shared_state.stop()
        return made

    monkeypatch.setattr(harness.trainer, "run_once", until_it_is_evaluated)
    harness.trainer.run()
    assert told(harness)["eval/0/rewarded"] == 1
    assert told(harness.restart()) == told(harness)
