"""What a trainer reports: scores of evaluations, its backlog, the metrics that docs/metrics.md names, and
what a step used of each trained token."""

import asyncio
import json
import logging
import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from docs.site.reference import metrics_page
from rollout_queue.contract.packed_tokens import TrainedTokens
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import SessionSpec
from tests.support.long_cases import in_turn
from tests.support.trainer_service.crash import Crash, crash
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.trainer_service.metric_files import curve, lines
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner, random_rows
from tests.support.trainer_service.recorded import (
    HALF_PRECISION,
    Numbers,
    assert_same_records,
    numbers_of,
    recorded,
)
from tests.support.trainer_service.related_rows import related_rows
from trainer_service.algorithms.aggregation import StepCounts
from trainer_service.algorithms.policy_loss import policy_loss
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.sums import Sums
from trainer_service.algorithms.tokens import Tokens
from trainer_service.rows.rows import Row
from trainer_service.step import optimizer_step
from trainer_service.step.diagnostics import SampledTokens, token_sums
from trainer_service.step.step_parts import LearnedTokens, StepRequest, turn_records


def evaluated(harness: Harness) -> dict[str, float]:
    metrics = harness.told | harness.shared_state.snapshot.evaluations
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}


def test_a_score_is_reported_at_the_step_that_made_its_version(make_harness: MakeHarness) -> None:
    harness = make_harness(initial_version=7).start()
    harness.step("g", version=7)
    harness.step("h", version=8)
    for number, value in enumerate([1.0, 0.5, 0.0]):
        harness.agents.evaluate(f"e{number}", value, version=8)
    harness.agents.evaluate("first", 0.25, version=7)
    assert not harness.trainer.run_once()
    assert evaluated(harness) == {
        "eval/8/rewarded": 3, "eval/8/unrewarded": 0, "eval/8/failed": 0, "eval/8/reward": 0.5,
        "eval/7/rewarded": 1, "eval/7/unrewarded": 0, "eval/7/failed": 0, "eval/7/reward": 0.25,
    }  # fmt: skip
    assert json.loads(str(harness.stream.trainer["metrics"])).items() >= evaluated(harness).items()
    assert [harness.sample("eval_reward", version=version) for version in "87"] == [0.5, 0.25]
    written = lines(harness.root / "metrics.eval.jsonl")
    scores = [(line["step"], line["version"], line["eval/reward"]) for line in written]
    assert scores == [(1, 8, 0.5), (0, 7, 0.25)]
    assert curve(harness.root / "tensorboard", "eval/reward") == [(1, 0.5), (0, 0.25)]
    assert {harness.session_codes()[name] for name in ("e0", "e1", "e2", "first")} == {"not_for_training"}


def test_missing_rewards_and_failures_do_not_change_the_mean_reward(harness: Harness) -> None:
    harness.agents.evaluate("a", None, version=1)
    harness.agents.evaluate("b", 0.75)
    harness.agents.evaluate("c", None)
    harness.agents.evaluate("d", -1.0, status="failed")
    harness.agents.evaluate("e", 0.25, status="truncated")
    harness.trainer.run_once()
    assert evaluated(harness) == {
        "eval/0/rewarded": 2, "eval/0/unrewarded": 1, "eval/0/failed": 1, "eval/0/reward": 0.5,
        "eval/1/rewarded": 0, "eval/1/unrewarded": 1, "eval/1/failed": 0,
    }  # fmt: skip
    assert harness.sample("eval_reward", version="1") is None, "without a reward there is no mean"
    ends = ("rewarded", "unrewarded", "failed")
    assert [harness.sample("eval_sessions", version="0", end=end) for end in ends] == [2, 1, 1]


def test_evaluations_do_not_change_metrics_of_the_training(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    harness.agents.evaluate("a", 100.0)
    harness.agents.evaluate("b", 100.0, status="truncated")
    harness.step("g")
    assert "is not trained" not in caplog.text, "nobody expects it to be"
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
    assert evaluated(harness)["eval/3/reward"] == 0.5
    assert not harness.pending


def test_a_session_that_two_versions_sampled_counts_for_the_one_that_sampled_more(
    harness: Harness,
) -> None:
    asyncio.run(harness.stream.open_session(SessionSpec(session_id="a", train=False, created_at=100.0)))
    first = turn("a", "t1", version=4, output_ids=[10, 1])
    second = turn("a", "t2", version=5, output_ids=[11, 12, 1], parent_id="t1", context_ids=[5])
    harness.agents.call(first, second)
    harness.agents.finish("a", 1.0, train=False)
    harness.trainer.run_once()
    assert evaluated(harness)["eval/5/rewarded"] == 1
    assert "eval/4/rewarded" not in evaluated(harness)


def test_only_the_last_versions_keep_their_scores(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_service.groups.evaluation.VERSIONS_KEPT", 2)
    for version in range(4):
        harness.agents.evaluate(f"e{version}", float(version) or None, version=version)
        harness.trainer.run_once()
    found = [harness.sample("eval_reward", version=str(version)) for version in range(4)]
    assert found == [None, None, 2.0, 3.0]
    assert {name.split("/")[1] for name in evaluated(harness)} == {"2", "3"}


def test_a_restart_goes_on_counting(harness: Harness) -> None:
    harness.agents.evaluate("a", 1.0)
    harness.step("g")
    again = harness.restart()
    assert evaluated(again)["eval/0/reward"] == again.sample("eval_reward", version="0") == 1.0
    again.agents.evaluate("b", 0.0)
    again.agents.evaluate("c", 0.5, version=1)
    again.trainer.run_once()
    assert evaluated(again)["eval/0/reward"] == 0.5
    written = lines(harness.root / "metrics.eval.jsonl")
    assert [(line["step"], line["version"]) for line in written] == [(0, 0), (0, 0), (1, 1)]


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


def test_scores_survive_a_stop_after_the_last_step(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    harness.agents.group("g", [1.0, 0.0])
    turn_of = harness.trainer.run_once

    def until_it_is_evaluated() -> bool:
        made = turn_of()
        if made:
            harness.agents.evaluate("late", 1.0)
        elif evaluated(harness):
            harness.shared_state.stop()
        return made

    monkeypatch.setattr(harness.trainer, "run_once", until_it_is_evaluated)
    harness.trainer.run()
    assert evaluated(harness)["eval/0/rewarded"] == 1
    assert evaluated(harness.restart()) == evaluated(harness)


def wait(harness: Harness) -> None:
    """Run the trainer's loop once without a step, after a heartbeat that reports at once."""
    harness.heartbeat.note(harness.trainer.step, harness.trainer.version)
    assert not harness.trainer.run_once()


def said(harness: Harness, *names: str) -> list[float]:
    return [float(harness.stream.trainer[f"rollouts_{name}"]) for name in names]


def test_the_trainer_reports_its_backlog(make_harness: MakeHarness) -> None:
    """Gateways admit only as many sessions as the trainer can train in time."""
    harness = make_harness(algorithm={"min_live_rows": 4}).start()
    wait(harness)
    assert said(harness, "waiting", "owed", "per_step") == [0, 0, 4], "the first estimate is min_live_rows"
    harness.agents.group("g", [1.0, 0.0])
    harness.agents.open("running")
    wait(harness)
    assert said(harness, "waiting") == [2]
    harness.agents.group("equal", [1.0, 1.0, 1.0])
    harness.step("h")
    # Then the mean of the first estimate and of what the step used, groups without advantages included.
    assert said(harness, "waiting", "owed", "per_step") == [0, 0, (4 + 7) / 2]


def test_the_trainer_reports_how_many_groups_had_different_rewards(make_harness: MakeHarness) -> None:
    """Also those that wait for their step. An evaluation and a group of one are not compared."""
    harness = make_harness(algorithm={"min_live_rows": 4}).start()
    harness.agents.group("equal", [0.0, 0.0])
    harness.agents.episode("alone", 1.0)
    harness.agents.evaluate("judged", 1.0)
    wait(harness)
    report = harness.shared_state.snapshot.report()
    assert (report.groups, report.groups_different) == (1, 0)
    harness.agents.group("live", [0.0, 1.0])
    wait(harness)
    wait(harness)
    assert {name: harness.stream.trainer[name] for name in ("groups", "groups_different")} == {
        "groups": "2",
        "groups_different": "1",
    }


def test_trained_sessions_that_no_checkpoint_contains_are_owed(make_harness: MakeHarness) -> None:
    harness = make_harness(checkpoint_every_steps=2).start()
    harness.step("g")
    assert said(harness, "waiting", "owed") == [0, 2]
    harness.step("h")
    assert said(harness, "owed") == [0]


DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def documented(section: str) -> list[str]:
    """The names before the colons of a section's list."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    rows = re.findall(r"^- (`[^`]+`(?:, `[^`]+`)*): ", rest.split("\n## ")[0], re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_a_step_has_the_names_of_the_document(harness: Harness) -> None:
    """And so has an evaluation."""
    harness.agents.evaluate("a", 1.0)
    harness.step("g")
    named = documented("Of every step")
    assert set(lines(harness.root / "metrics.jsonl")[0]) == set(named)
    assert len(named) == len(set(named))
    (line,) = lines(harness.root / "metrics.eval.jsonl")
    assert set(line) == {"step", "version", "time", *documented("Evaluation")}


def test_a_step_with_a_critic_has_the_names_of_the_document_as_well(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"advantage": {"name": "gae"}}, critic={}).start()
    harness.step("g")
    named = documented("Of every step") + documented("With a critic")
    assert set(lines(harness.root / "metrics.jsonl")[0]) == set(named)


def test_prometheus_has_the_names_of_the_document(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.agents.evaluate("a", 1.0)
    harness.step("g")
    of_steps = {f"weir_trainer_{name.replace('/', '_')}" for name in documented("Of every step")}
    counted = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in harness.registry.collect()
        if metric.name.startswith("weir_trainer_")
    }
    page = "\n".join(metrics_page()).partition("\n## trainer\n")[2].split("\n## ")[0]
    of_the_app = {"weir_trainer_policies_bytes", "weir_trainer_disk_free_bytes"}
    assert counted - of_steps == set(re.findall(r"^\| `(weir_trainer_\w+)` \|", page, re.M)) - of_the_app
    # Prometheus gets the tokens from a counter with another name, and adds the time itself.
    untold = {"weir_trainer_tokens", "weir_trainer_time"}
    assert of_steps - counted == untold


class CountedValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the values that torch's operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        every = found if isinstance(found, (tuple, list)) else [found]
        self.values += sum(each.numel() for each in every if isinstance(each, Tensor))
        return found


def test_ranks_exchange_no_more_with_more_tokens(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[int] = []

    def gather(values: list[Any]) -> list[Any]:
        if any(isinstance(each, Sums) for each in values):  # records of turns have a number for each token
            exchanged.append(len(pickle.dumps(values)))
        return values

    monkeypatch.setattr(harness.policy, "all_gather", gather)
    for name, tokens in (("short", 10), ("long", 400)):
        for reward in (1.0, 0.0):
            answer = {"output_ids": [10] * tokens, "logprobs": [-1.0] * tokens}
            harness.agents.episode(f"{name}-{reward}", reward, group_id=name, size=2, **answer)
        assert harness.trainer.run_once()
    short, long = exchanged
    assert long == pytest.approx(short, rel=0.1)  # some numbers take fewer bytes than others


def test_many_rows_cost_no_more_than_one_with_the_same_tokens() -> None:
    tokens = 2**14

    def values_of(rows: int) -> int:
        rows_T = torch.arange(rows).repeat_interleave(tokens // rows)
        lp_T = torch.full((tokens,), -1.0)
        some = Tokens(lp_T, lp_T, lp_T, torch.zeros(tokens), rows_T)
        counts = StepCounts(torch.full((rows,), tokens // rows), torch.arange(rows), torch.zeros(rows).long())
        losses = policy_loss(some, AlgorithmSettings(), counts)
        with CountedValues() as counted:
            token_sums(some, SampledTokens(lp_T, lp_T, torch.zeros(tokens).long()), losses, version=1)
        return int(counted.values)

    assert values_of(1024) < 1.5 * values_of(1)


CRITIC = {"optimizer": {"lr": 1e-2, "warmup_steps": 0}}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "drgrpo": {},
    "grpo": {"advantage": "grpo_ddof1"},
    "gae": {"advantage": {"name": "gae", "gamma": 0.5}},
    "reinforce_pp_baseline": {"advantage": {"name": "reinforce_pp_baseline"}},
}
MEANS = ["token_mean", "seq_mean_token_mean"]


def stored(harness: Harness) -> dict[str, Numbers]:
    """The numbers beside the verdicts, by turn."""
    heads = harness.stream.heads.values()
    return {name: numbers_of(packed) for head in heads for name, packed in head.trained_tokens.items()}


class Loss:
    """Notes what the loss was given of each token: the row's number, and the advantage."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[Tokens] = []

        def noted(tokens: Tokens, *given: Any) -> Any:
            self.seen.append(tokens)
            return policy_loss(tokens, *given)

        patch.setattr(optimizer_step, "policy_loss", noted)

    def advantages(self, row: int) -> list[float]:
        found = [tokens.advantages_T[tokens.rows_T == row].tolist() for tokens in self.seen]
        return [advantage for part in found for advantage in part]


@pytest.mark.parametrize(("algorithm", "mean"), in_turn(list(ADVANTAGES.values()), MEANS), ids=str)
def test_the_recorded_advantages_are_those_of_the_loss(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any], mean: str
) -> None:
    critic = CRITIC if "gamma" in algorithm.get("advantage", "") else None
    settings = {"streaming": False, "aggregation": {"mode": mean}} | algorithm
    harness = make_harness(algorithm=settings, critic=critic).start()
    loss = Loss(monkeypatch)
    harness.step("g")
    found = stored(harness)
    assert len(found) == 2
    for row, name in enumerate(found):
        assert found[name].advantages == loss.advantages(row)
    assert len(set(found["g-0-t"].advantages or ())) == (3 if critic else 1)


def test_ratios_are_near_one_but_for_a_token_off_policy(make_harness: MakeHarness, model_path: Any) -> None:
    """The engine's log-probabilities are the model's own, but that of one token."""
    from transformers import AutoModelForCausalLM

    harness = make_harness().start()
    model = AutoModelForCausalLM.from_pretrained(model_path)
    context, off = [2, 3, 4], 0.75
    for index, output in enumerate([[10, 20, 1], [11, 21, 1]]):
        ids = torch.tensor([[*context, *output]])
        with torch.no_grad():
            lp_T = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0][-3:].tolist()
        lp_T[1] -= off * index
        given = {"output_ids": output, "logprobs": lp_T, "context_ids": context}
        harness.agents.episode(f"g-{index}", 1.0 - index, group_id="g", size=2, **given)
    assert harness.trainer.run_once()
    found = stored(harness)
    assert found["g-0-t"].ratios == pytest.approx([1.0] * 3, rel=2 * HALF_PRECISION)
    assert found["g-1-t"].ratios == pytest.approx([1.0, math.exp(off), 1.0], rel=2 * HALF_PRECISION)
    rho_max = harness.told["mismatch/rho_max"]
    assert rho_max == pytest.approx(math.exp(off), rel=2 * HALF_PRECISION)


def test_each_turn_of_a_tree_has_the_numbers_of_its_own_tokens(make_harness: MakeHarness) -> None:
    """The second branch of the tree trains only its tip; turns have unequal lengths. Each turn has another
    log-probability of the engine, e^-1 times the one before."""
    harness = make_harness(algorithm={"streaming": False, "advantage": "gae"}, critic=CRITIC).start()
    lengths = {"root": 2, "one": 4, "two": 3}
    for session_id, value in (("a", 1.0), ("b", 0.0)):
        harness.agents.open(session_id, "g", 2)
        for at, (name, length) in enumerate(lengths.items()):
            parent_id = f"{session_id}-root" if at else None
            sampled = {"output_ids": list(range(10 + at, 10 + at + length)), "logprobs": [-4.0 - at] * length}
            where = {"parent_id": parent_id, "started_at": 100.0 + at}
            harness.agents.call(turn(session_id, f"{session_id}-{name}", **sampled, **where))
        harness.agents.finish(session_id, value)
    assert harness.trainer.run_once()
    found = stored(harness)
    assert {name: len(numbers.ratios or ()) for name, numbers in found.items()} == {
        f"{session_id}-{name}": length for session_id in "ab" for name, length in lengths.items()
    }
    means = {name: fmean(ratio or 0 for ratio in numbers.ratios or ()) for name, numbers in found.items()}
    assert means["a-one"] / means["a-root"] == pytest.approx(math.e, rel=0.5)
    assert means["a-two"] / means["a-root"] == pytest.approx(math.e**2, rel=0.5)


@pytest.mark.parametrize(
    ("recorded_tokens", "advantages", "ratios"),
    [("none", False, False), ("advantages", True, False), ("all", True, True)],
)
def test_the_setting_says_what_is_recorded(
    make_harness: MakeHarness, recorded_tokens: str, advantages: bool, ratios: bool
) -> None:
    harness = make_harness(record_tokens=recorded_tokens).start()
    harness.step("g")
    for packed in harness.stream.heads["g-0"].trained_tokens.values():
        found = TrainedTokens.unpack(packed)
        assert found.tokens == 3
        assert (found.advantages is not None, found.ratios is not None) == (advantages, ratios)
        assert len(found.advantages or b"four") == 4, "equal advantages are stored once"
    harness.step("h")
    made = {"turns": 2, "sessions": 2, "tokens": 6}
    steps = [TrainedStep(step=number, version=number, base=number - 1, **made) for number in (1, 2)]
    assert harness.stream.steps == dict(enumerate(steps, start=1)), "with the version that each began from"


def test_a_loss_without_advantages_records_none(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"loss": {"name": "cross_entropy"}, "min_live_rows": 1}).start()
    harness.agents.episode("s", 1.0)
    assert harness.trainer.run_once()
    (numbers,) = stored(harness).values()
    assert numbers.advantages is None
    assert len(numbers.ratios or ()) == 3


def test_a_step_that_does_not_last_leaves_no_record(make_harness: MakeHarness) -> None:
    """The process ends after the step and before its checkpoint: the next one trains the step again."""
    harness = make_harness(checkpoint_every_steps=2).start()
    harness.step("a")
    assert stored(harness) == {}
    assert harness.stream.steps == {}
    harness = harness.restart()
    assert harness.trainer.run_once()
    assert stored(harness) == {}
    harness.step("b")
    assert stored(harness).keys() == {"a-0-t", "a-1-t", "b-0-t", "b-1-t"}
    assert list(harness.stream.steps) == [harness.trainer.version - 1, harness.trainer.version]


def test_a_lasting_step_is_recorded_after_a_crash(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends between the checkpoint and its acknowledgement."""
    harness = make_harness().start()
    with monkeypatch.context() as patch:
        patch.setattr(harness.stream, "acknowledge", crash)
        with pytest.raises(Crash):
            harness.step("a")
    assert stored(harness) == {}
    (checkpoint,) = harness.settings.checkpoint_dir.glob("*-step-*1")
    owed = json.loads((checkpoint / "state.json").read_bytes())["owed"]
    assert all(each["trained"] for each in owed["turns"])
    harness.restart()
    assert [each.advantages for each in stored(harness).values()] == [[0.5] * 3, [-0.5] * 3]
    assert list(harness.stream.steps) == [1]


# The ways in which the rows of a step are computed
def step(learner: OneRankLearner, rows: Sequence[Row], *parts: int) -> Any:
    """Make one step of all rows, of which parts were accumulated before."""
    algorithm, done = learner.settings.algorithm, 0
    for count in parts:
        learner.leader.accumulate(StepRequest(rows[done : done + count], 0, algorithm, recorded="all"))
        done += count
    learner.leader.optimise(StepRequest(rows[done:], 0, algorithm, recorded="all"))
    return learner.leader.records


@pytest.mark.parametrize(
    ("algorithm", "parts"),
    [
        ({"max_tokens": 40}, ()),
        ({"max_tokens": 1000}, ()),
        ({}, (4, 4)),
        ({"epochs": 2}, (4, 8)),
        ({"mini_batches": 3, "epochs": 2}, ()),
        ({"loss": {"name": "gspo"}}, ()),
    ],
    ids=str,
)
def test_every_way_through_a_step_delivers_the_same_numbers(
    make_learner: MakeLearner, algorithm: dict[str, Any], parts: Sequence[int]
) -> None:
    rows = [replace(row, group_id=f"g{at // 4}") for at, row in enumerate(random_rows(1, 12))]
    plain = step(make_learner(), rows)
    learner = make_learner(algorithm={"max_tokens": 64} | algorithm)
    assert_same_records(step(learner, rows, *parts), plain)
    found = recorded(plain)
    for row in rows:
        numbers = found[row.session_id, row.turn_ids[0]]
        assert numbers.advantages == pytest.approx([row.advantage] * row.trained_tokens)


def test_rows_that_share_prefixes_deliver_the_same_numbers(make_learner: MakeLearner) -> None:
    rows = related_rows(roots=2, branches=2, tips=2)
    common = {"algorithm": {"max_tokens": 300}}
    plain, shared = (make_learner(share_prefixes=shares, **common) for shares in (False, True))
    assert_same_records(step(shared, rows), step(plain, rows))


def test_a_step_that_is_not_made_records_nothing(make_learner: MakeLearner) -> None:
    learner = make_learner()
    assert len(step(learner, random_rows(1, 3))) == 3
    assert step(learner, random_rows(2, 3, temperature=1e-42)) == ()
    learner.leader.optimise(StepRequest(random_rows(1, 3), 0, learner.settings.algorithm))
    assert learner.leader.records == ()


def test_ratios_stay_within_half_precision() -> None:
    row = random_rows(0, 1)[0]
    log_rho_T = torch.tensor([0.0, 100.0, float("inf"), -100.0, float("-inf"), float("nan")])
    tokens = np.zeros(6, np.int64)
    (found,) = turn_records(LearnedTokens(tokens, tokens, None, log_rho_T), [row])
    assert numbers_of(found.packed).ratios == [1.0, 65504.0, 65504.0, 0.0, 0.0, None]
