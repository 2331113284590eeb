"""What a step used of each trained token is recorded once the step lasts: its advantage and its ratio."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from rollout_queue.contract.policies.trained_step import TrainedStep
from rollout_queue.contract.turn_parts.trained_tokens import TrainedTokens
from tests.support.long_cases import in_turn
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner, random_rows
from tests.support.trainer_service.recorded import (
    HALF_PRECISION,
    Numbers,
    assert_same_records,
    numbers_of,
    recorded,
)
from tests.support.trainer_service.related_rows import related_rows
from trainer_service.algorithms.policy_loss import policy_loss
from trainer_service.algorithms.tokens import Tokens
from trainer_service.rows.rows import Row
from trainer_service.step import optimizer_step
from trainer_service.step.step_request import StepRequest
from trainer_service.step.token_records import LearnedTokens, turn_records

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
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    found = stored(harness)
    assert len(found) == 2
    for row, name in enumerate(found):
        assert found[name].advantages == loss.advantages(row)
    assert len(set(found["g-0-t"].advantages or ())) == (3 if critic else 1)


@pytest.mark.parametrize(
    ("advantage", "expected"), [("drgrpo", [0.5, -0.5]), ("grpo_ddof1", [math.sqrt(0.5), -math.sqrt(0.5)])]
)
def test_the_advantages_are_those_of_the_formula(
    make_harness: MakeHarness, advantage: str, expected: Sequence[float]
) -> None:
    harness = make_harness(algorithm={"advantage": advantage}).start()
    harness.step("g")
    assert [each.advantages for each in stored(harness).values()] == [
        pytest.approx([value] * 3, rel=1e-4) for value in expected
    ]
    packed = harness.stream.heads["g-0"].trained_tokens["g-0-t"]
    assert len(TrainedTokens.unpack(packed).advantages or b"") == 4, "equal advantages are stored once"


def test_ratios_are_near_one_on_policy_and_show_a_token_that_is_not(
    make_harness: MakeHarness, model_path: Any
) -> None:
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
    rho_max = harness.shared_state.snapshot.metrics["mismatch/rho_max"]
    assert rho_max == pytest.approx(math.exp(off), rel=2 * HALF_PRECISION)


def test_each_turn_of_a_tree_has_the_numbers_of_its_own_tokens(make_harness: MakeHarness) -> None:
    """The second branch of the tree trains only its tip; turns have unequal lengths."""
    harness = make_harness(algorithm={"streaming": False, "advantage": "gae"}, critic=CRITIC).start()
    agents, lengths = harness.agents, {"root": 2, "one": 4, "two": 3}
    for session_id, value in (("a", 1.0), ("b", 0.0)):
        agents.open(session_id, "g", 2)
        parents = {"root": None, "one": "root", "two": "root"}
        for at, (name, parent_id) in enumerate(parents.items()):
            output = list(range(10 + at, 10 + at + lengths[name]))
            parent = None if parent_id is None else f"{session_id}-{parent_id}"
            agents.call(
                turn(
                    session_id,
                    f"{session_id}-{name}",
                    parent_id=parent,
                    output_ids=output,
                    started_at=100.0 + at,
                    logprobs=[-4.0 - at] * len(output),
                )
            )
        agents.finish(session_id, value)
    assert harness.trainer.run_once()
    found = stored(harness)
    assert {name: len(numbers.ratios or ()) for name, numbers in found.items()} == {
        f"{session_id}-{name}": length for session_id in "ab" for name, length in lengths.items()
    }
    # Each turn has another log-probability of the engine, e^-1 times the one before.
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
    assert harness.stream.steps == {1: TrainedStep(step=1, version=1, base=0, turns=2, sessions=2, tokens=6)}


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


def test_a_step_that_lasts_is_recorded_after_a_crash(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends between the checkpoint and its acknowledgement."""
    harness = make_harness().start()
    with monkeypatch.context() as patch:
        patch.setattr(harness.stream, "acknowledge", _fails)
        with pytest.raises(RuntimeError):
            harness.step("a")
    assert stored(harness) == {}
    (checkpoint,) = harness.settings.checkpoint_dir.glob("*-step-*")
    owed = json.loads((checkpoint / "state.json").read_bytes())["owed"]
    assert all(each["trained"] for each in owed["turns"])
    harness.restart()
    assert [each.advantages for each in stored(harness).values()] == [[0.5] * 3, [-0.5] * 3]
    assert list(harness.stream.steps) == [1]


def _fails(*given: Any) -> None:
    raise RuntimeError("the process ends")


def test_a_step_says_which_version_it_began_from(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    for name in "abc":
        harness.step(name)
    assert [(each.base, each.version) for each in harness.stream.steps.values()] == [(0, 1), (1, 2), (2, 3)]


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
