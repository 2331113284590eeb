"""Evaluation while training: sessions that are never trained, and what they say of each version."""

import asyncio
import json
from pathlib import Path

import pytest

from rollout_queue.contract.records import SessionSpec
from tests.support.trainer_service.metric_files import curve, lines
from tests.support.trainer_service.rig import MakeRig, Rig, turn


def sample(rig: Rig, name: str, **labels: str) -> float | None:
    value: float | None = rig.registry.get_sample_value(f"weir_trainer_{name}", labels)
    return value


def told(rig: Rig) -> dict[str, float]:
    metrics: dict[str, float] = rig.shared_state.snapshot.metrics | rig.shared_state.snapshot.evaluations
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}


def test_what_sessions_say_of_a_version_is_told_at_the_step_that_made_it(make_rig: MakeRig) -> None:
    rig = make_rig(initial_version=7).start()
    rig.step("g", version=7)
    rig.step("h", version=8)
    for number, value in enumerate([1.0, 0.5, 0.0]):
        rig.agents.evaluate(f"e{number}", value, version=8)
    rig.agents.evaluate("first", 0.25, version=7)
    assert not rig.trainer.run_once()
    assert told(rig) == {
        "eval/8/rewarded": 3, "eval/8/unrewarded": 0, "eval/8/failed": 0, "eval/8/reward": 0.5,
        "eval/7/rewarded": 1, "eval/7/unrewarded": 0, "eval/7/failed": 0, "eval/7/reward": 0.25,
    }  # fmt: skip
    assert json.loads(str(rig.stream.trainer["metrics"])).items() >= told(rig).items()
    assert (sample(rig, "eval_reward", version="8"), sample(rig, "eval_reward", version="7")) == (0.5, 0.25)
    written = lines(rig.root / "metrics.eval.jsonl")
    assert [(line["step"], line["version"], line["eval/reward"]) for line in written] == [
        (1, 8, 0.5),
        (0, 7, 0.25),
    ]
    assert curve(rig.root / "tensorboard", "eval/reward") == [(1, 0.5), (0, 0.25)]
    assert {rig.session_codes()[name] for name in ("e0", "e1", "e2", "first")} == {"not_for_training"}


def test_no_reward_is_not_0_and_a_failure_is_not_a_reward(rig: Rig) -> None:
    rig.agents.evaluate("a", 0.75)
    rig.agents.evaluate("b", None)
    rig.agents.evaluate("c", -1.0, status="failed")
    rig.agents.evaluate("d", 0.25, status="truncated")
    rig.trainer.run_once()
    assert told(rig) == {
        "eval/0/rewarded": 2, "eval/0/unrewarded": 1, "eval/0/failed": 1, "eval/0/reward": 0.5
    }  # fmt: skip
    counts = {
        end: sample(rig, "eval_sessions", version="0", end=end)
        for end in ("rewarded", "unrewarded", "failed")
    }
    assert counts == {"rewarded": 2, "unrewarded": 1, "failed": 1}


def test_a_version_that_nobody_rewarded_has_no_reward(rig: Rig) -> None:
    rig.agents.evaluate("a", None)
    rig.trainer.run_once()
    assert told(rig) == {"eval/0/rewarded": 0, "eval/0/unrewarded": 1, "eval/0/failed": 0}
    assert sample(rig, "eval_reward", version="0") is None


def test_evaluation_is_in_no_figure_of_the_training(rig: Rig) -> None:
    rig.agents.evaluate("a", 100.0)
    rig.agents.evaluate("b", 100.0, status="truncated")
    rig.step("g")
    values = lines(rig.root / "metrics.jsonl")[0]
    assert (values["reward_mean"], values["rollouts"], values["len/truncated"]) == (0.5, 2, 0)
    assert (values["group/live"], values["group/singleton"], values["group/dropped"]) == (1, 0, 0)


def test_a_turn_that_asked_for_a_version_is_not_trained_and_its_session_is_evaluation(rig: Rig) -> None:
    """The call alone pinned it; whoever opened the session said nothing of evaluation."""
    for name, value in (("a", 1.0), ("b", 0.0)):
        rig.agents.open(name, "g", 2)
        rig.agents.call(turn(name, f"{name}-t", policy="policy@3", version=3))
        rig.agents.finish(name, value)
    assert not rig.trainer.run_once()
    assert rig.session_codes() == {"a": "not_for_training", "b": "not_for_training"}
    assert rig.stream.heads["a"].turn_verdicts["a-t"].code == "not_for_training"
    assert told(rig)["eval/3/reward"] == 0.5
    assert not list(rig.stream.reclaim())


def test_a_session_that_two_versions_sampled_counts_for_the_one_that_sampled_more(rig: Rig) -> None:
    asyncio.run(rig.stream.open_session(SessionSpec(session_id="a", train=False, created_at=100.0)))
    first = turn("a", "t1", version=4, output_ids=[10, 1])
    second = turn("a", "t2", version=5, output_ids=[11, 12, 1], parent_id="t1", context_ids=[5])
    rig.agents.call(first, second)
    rig.agents.finish("a", 1.0, train=False)
    rig.trainer.run_once()
    assert told(rig)["eval/5/rewarded"] == 1
    assert "eval/4/rewarded" not in told(rig)


def test_of_many_versions_the_last_ones_are_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_service.groups.evaluation.VERSIONS_KEPT", 2)
    for version in range(4):
        rig.agents.evaluate(f"e{version}", float(version) or None, version=version)
        rig.trainer.run_once()
    found = [sample(rig, "eval_reward", version=str(version)) for version in range(4)]
    assert found == [None, None, 2.0, 3.0]
    assert {name.split("/")[1] for name in told(rig)} == {"2", "3"}


def test_a_restart_goes_on_counting(rig: Rig) -> None:
    rig.agents.evaluate("a", 1.0)
    rig.step("g")
    again = rig.restart()
    assert told(again)["eval/0/reward"] == sample(again, "eval_reward", version="0") == 1.0
    again.agents.evaluate("b", 0.0)
    again.agents.evaluate("c", 0.5, version=1)
    again.trainer.run_once()
    assert told(again)["eval/0/reward"] == 0.5
    assert _places(rig.root / "metrics.eval.jsonl") == [(0, 0), (0, 0), (1, 1)]


def _places(path: Path) -> list[tuple[int, int]]:
    return [(line["step"], line["version"]) for line in lines(path)]


def test_how_trained_turns_stand_to_their_conversation_is_counted(rig: Rig) -> None:
    relations = [
        ("t1", "root", None),
        ("t2", "extends", "t1"),
        ("t3", "rerendered", "t2"),
        ("t4", "forks", "t2"),
    ]
    for name, value in (("a", 1.0), ("b", 0.0)):
        rig.agents.open(name, "g", 2)
        for at, (suffix, relation, parent) in enumerate(relations):
            parent_id = parent and f"{name}-{parent}"
            where = {"relation": relation, "parent_id": parent_id, "started_at": 100.0 + at}
            rig.agents.call(turn(name, f"{name}-{suffix}", context_ids=[2 + at], **where))
        aborted = {"finish": "abort", "relation": "extends", "parent_id": f"{name}-t2"}
        rig.agents.call(turn(name, f"{name}-t5", context_ids=[9], **aborted))
        rig.agents.finish(name, value)
    assert rig.trainer.run_once()
    values = lines(rig.root / "metrics.jsonl")[0]
    assert [values[f"drift/{name}"] for name in ("clean", "realign", "fork")] == [2, 2, 2]


def test_scores_survive_a_clean_stop_after_the_last_step(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.agents.group("g", [1.0, 0.0])
    turn_of = rig.trainer.run_once

    def until_it_is_evaluated() -> bool:
        made = turn_of()
        if made:
            rig.agents.evaluate("late", 1.0)
        elif told(rig):
            rig.shared_state.stop()
        return made

    monkeypatch.setattr(rig.trainer, "run_once", until_it_is_evaluated)
    rig.trainer.run()
    assert told(rig)["eval/0/rewarded"] == 1
    assert told(rig.restart()) == told(rig)
