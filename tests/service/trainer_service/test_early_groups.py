"""A step that accumulates the gradients of groups as they arrive equals a step of all groups at once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.long_cases import cases, in_turn
from tests.support.tolerances import BFLOAT16, FLOAT32, ulps
from tests.support.trainer_service.checkpoints import saved_checkpoint
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.random_rows import POISON, MakeLearner, OneRankLearner, random_rows
from tests.support.trainer_service.same_training import (
    TERMS,
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    differs_by,
    same_metrics,
)
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.rows.rows import Row
from trainer_service.step.step_request import StepRequest
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

pytestmark = pytest.mark.numeric

AGGREGATIONS: list[dict[str, Any]] = [
    {"mode": "token_mean"},
    {"mode": "token_sum"},
    {"mode": "seq_mean_token_mean"},
    {"mode": "seq_mean_token_sum"},
    {"mode": "seq_mean_token_sum_norm", "horizon": 50},
    {"mode": "prompt_mean"},
    {"mode": "rollout_mean"},
    {"mode": "fixed_denominator", "denominator": 100},
]


def grouped(seed: int, count: int = 12, **fields: Any) -> list[Row]:
    """Groups of four rows; each rollout has two rows, which are forks."""
    rows = random_rows(seed, count, **fields)
    return [
        replace(row, session_id=f"s{index // 2}", group_id=f"g{index // 4}") for index, row in enumerate(rows)
    ]


def learn(learner: OneRankLearner, rows: Sequence[Row], *parts: int) -> dict[str, float]:
    """Make one step of all rows. Before it, accumulate parts of them, of as many rows as `parts` says."""
    algorithm, done = learner.settings.algorithm, 0
    for count in parts:
        learner.leader.accumulate(StepRequest(rows[done : done + count], 0, algorithm))
        done += count
    return learner.leader.optimise(StepRequest(rows[done:], 0, algorithm))


@pytest.mark.parametrize("stage", cases([1], long=[0, 2, 3]))
def test_a_step_in_parts_equals_the_step_at_once(
    make_learner: MakeLearner, untrained: Weights, stage: int
) -> None:
    whole, parted = (make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED) for _ in range(2))
    for seed, parts in enumerate([(4,), (4, 4), (4, 8), ()]):  # the third step has no rows left to add
        rows = grouped(seed)
        assert learn(parted, rows, *parts) == same_metrics(learn(whole, rows))
    assert_moved_alike(whole.exported(), parted.exported(), untrained)


@pytest.mark.parametrize(("aggregation", "epochs"), in_turn(AGGREGATIONS, [1, 2]), ids=str)
def test_a_step_in_parts_equals_the_step_at_once_with_every_aggregation(
    make_learner: MakeLearner, untrained: Weights, aggregation: dict[str, Any], epochs: int
) -> None:
    algorithm = {"max_tokens": 64, "aggregation": aggregation, "epochs": epochs}
    whole, parted = (make_learner(optimizer=WELL_CONDITIONED, algorithm=algorithm) for _ in range(2))
    for seed, parts in enumerate([(4,), (4, 4)]):
        rows = grouped(seed)
        assert learn(parted, rows, *parts) == same_metrics(learn(whole, rows))
    assert_moved_alike(whole.exported(), parted.exported(), untrained)


@pytest.mark.parametrize("stage", cases([0, 2], long=[1, 3]))
def test_discarded_gradients_change_nothing(make_learner: MakeLearner, stage: int) -> None:
    spared, struck = (make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED) for _ in range(2))
    for learner in (spared, struck):
        learner.learn(1)
    struck.leader.accumulate(StepRequest(grouped(2), 0, struck.settings.algorithm))
    struck.leader.discard_gradients()
    struck.leader.discard_gradients()  # there are no gradients to discard
    assert learn(struck, grouped(3), 4) == learn(spared, grouped(3), 4)
    assert differs_by(spared.exported(), struck.exported()) == 0


@pytest.mark.parametrize(
    ("stage", "given"),
    in_turn([1, 2, 3], [{"lora": {"rank": 2}}, {"offload_optimizer": True}, {"dtype": "bfloat16"}]),
    ids=str,
)
def test_parts_and_discarded_gradients_change_nothing_with_other_settings(
    make_learner: MakeLearner, untrained: Weights, given: dict[str, Any], stage: int
) -> None:
    whole, parted = (make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED, **given) for _ in range(2))
    parted.leader.accumulate(StepRequest(grouped(2), 0, parted.settings.algorithm))
    parted.leader.discard_gradients()
    # A gradient of bfloat16 is rounded in each of at most 12 micro-batches for the 12 rows.
    unit, roundings = (BFLOAT16, 12) if given.get("dtype") else (FLOAT32, TERMS)
    told = learn(parted, grouped(3), 4)
    wanted = pytest.approx(learn(whole, grouped(3))["grad_norm"], rel=ulps(roundings, unit=unit))
    assert told["grad_norm"] == wanted
    assert_moved_alike(whole.exported(), parted.exported(), untrained, roundings, steps=1, unit=unit)


@pytest.mark.parametrize("stage", cases([0, 1], long=[2, 3]))
def test_a_part_that_is_not_finite_spoils_only_its_own_step(make_learner: MakeLearner, stage: int) -> None:
    spared, struck = (make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED) for _ in range(2))
    struck.leader.accumulate(StepRequest(grouped(2, temperature=POISON), 0, struck.settings.algorithm))
    told = struck.learn(4)
    assert told["updates"] == 0
    assert not told["grad_norm"] < float("inf")
    assert learn(struck, grouped(3), 4) == learn(spared, grouped(3), 4)
    assert differs_by(spared.exported(), struck.exported()) == 0


@pytest.mark.parametrize("stage", cases([1, 3], long=[0, 2]))
def test_a_checkpoint_during_a_step_does_not_change_the_step(make_learner: MakeLearner, stage: int) -> None:
    straight, saved = (make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED) for _ in range(2))
    rows = grouped(1)
    saved.leader.accumulate(StepRequest(rows[:4], 0, saved.settings.algorithm))
    saved_checkpoint(Checkpoints(saved.root / "c", 2), saved.leader, RunState(step=0))
    assert saved.leader.weights_are_finite()
    assert saved.exported()
    told = saved.leader.optimise(StepRequest(rows[4:], 0, saved.settings.algorithm))
    assert told == learn(straight, rows, 4)
    assert differs_by(straight.exported(), saved.exported()) == 0


EARLY = {"min_live_rows": 4, "max_tokens": 12}
"""A group of two episodes, of 6 tokens each, fills a pass; two groups are a step."""
OTHER = [5, 6, 7]
"""The second group's context. With the same context, its rewards would cancel the first group's gradients."""


def early(make_harness: MakeHarness, name: str = "run", **algorithm: Any) -> Harness:
    return make_harness(name, algorithm=EARLY | algorithm, optimizer=WELL_CONDITIONED).start()


def test_the_trainer_learns_from_a_group_while_it_waits_for_another(
    make_harness: MakeHarness, untrained: Weights
) -> None:
    harness, patient = early(make_harness), early(make_harness, "patient", streaming=False)
    for each in (harness, patient):
        each.agents.group("a", [1.0, 0.0])
        assert not each.trainer.run_once()
        assert not each.trainer.run_once()
    said = harness.shared_state.snapshot.waiting_for
    assert said is not None
    assert said.endswith("; 6 tokens are already learned")
    for each in (harness, patient):
        each.agents.group("b", [0.0, 1.0], context_ids=OTHER)
        assert each.trainer.run_once()
    assert harness.shared_state.snapshot.metrics["early_frac"] == 0.5
    assert patient.shared_state.snapshot.metrics["early_frac"] == 0.0
    assert harness.shared_state.snapshot.metrics["grad_norm"] == pytest.approx(
        patient.shared_state.snapshot.metrics["grad_norm"], rel=ulps(TERMS)
    )
    assert_moved_alike(harness.weights(), patient.weights(), untrained)
    assert set(harness.session_codes().values()) == {"trained"}
    assert harness.shared_state.snapshot.metrics["tokens"] == 12
    harness.agents.group("c", [1.0, 0.0])
    harness.agents.group("d", [1.0, 0.0])
    assert harness.trainer.run_once()
    assert harness.shared_state.snapshot.metrics["early_frac"] == 0.0


def test_a_group_that_fills_no_pass_waits_for_others(make_harness: MakeHarness) -> None:
    harness = early(make_harness, max_tokens=13)
    harness.agents.group("a", [1.0, 0.0])
    assert not harness.trainer.run_once()
    said = harness.shared_state.snapshot.waiting_for
    assert said is not None
    assert "learned" not in said


def test_an_early_group_that_is_deleted_is_not_in_the_step(
    make_harness: MakeHarness, untrained: Weights
) -> None:
    harness, spared = early(make_harness), early(make_harness, "spared", streaming=False)
    harness.agents.group("a", [1.0, 0.0])
    assert not harness.trainer.run_once()
    for session_id in ("a-0", "a-1"):
        harness.agents.delete(session_id)
    for each in (harness, spared):
        each.agents.group("b", [0.0, 1.0], context_ids=OTHER)
        each.agents.group("c", [1.0, 0.0])
        while not each.trainer.run_once():
            pass
    assert_moved_alike(harness.weights(), spared.weights(), untrained)
    assert harness.shared_state.snapshot.metrics["tokens"] == 12
    assert {harness.session_codes()[session_id] for session_id in ("b-0", "b-1", "c-0", "c-1")} == {"trained"}


def test_a_second_reward_of_an_early_group_is_in_the_step(
    make_harness: MakeHarness, untrained: Weights
) -> None:
    harness, patient = early(make_harness), early(make_harness, "patient", streaming=False)
    for each in (harness, patient):
        each.agents.group("a", [1.0, 0.0])
        assert not each.trainer.run_once()
        each.agents.reward("a-1", 3.0, key="later")
        assert not each.trainer.run_once()
    said = harness.shared_state.snapshot.waiting_for
    assert said is not None
    assert "learned" not in said, "after a change, nothing is learned early until the next step"
    for each in (harness, patient):
        each.agents.group("b", [0.0, 1.0], context_ids=OTHER)
        assert each.trainer.run_once()
    assert harness.shared_state.snapshot.metrics == same_metrics(
        patient.shared_state.snapshot.metrics | timings(harness)
    )
    assert_moved_alike(harness.weights(), patient.weights(), untrained)
    for group in ("c", "d"):
        harness.agents.group(group, [1.0, 0.0])
        harness.trainer.run_once()
    assert harness.shared_state.snapshot.metrics["early_frac"] == 0.5, "the next step learns early again"


def timings(harness: Harness) -> dict[str, float]:
    values = harness.shared_state.snapshot.metrics
    return {
        name: value for name, value in values.items() if name.startswith(("seconds/", "tokens_per", "time"))
    }


def test_an_early_group_is_in_the_step_although_newer_groups_come(make_harness: MakeHarness) -> None:
    harness = early(make_harness, max_rows=4)
    harness.agents.group("a", [1.0, 0.0], at=300.0)
    assert not harness.trainer.run_once()
    for newer, at in (("b", 400.0), ("c", 401.0)):
        harness.agents.group(newer, [1.0, 0.0], at=at)
    assert harness.trainer.run_once()
    assert harness.shared_state.snapshot.metrics["early_frac"] == 0.5
    codes = harness.session_codes()
    assert (codes["a-0"], codes["b-0"], codes["c-0"]) == ("trained", None, "trained")


def test_an_early_group_without_a_finite_gradient_is_found(
    make_harness: MakeHarness,
) -> None:
    harness = early(make_harness)
    harness.agents.group("a", [1.0, 0.0], temperature=POISON)
    assert not harness.trainer.run_once()
    harness.agents.group("b", [0.0, 1.0])
    assert not harness.trainer.run_once()
    assert {harness.session_codes()[each] for each in ("a-0", "a-1")} == {"invalid"}
    harness.agents.group("c", [0.0, 1.0])
    while not harness.trainer.run_once():
        pass
    assert {harness.session_codes()[each] for each in ("b-0", "b-1", "c-0", "c-1")} == {"trained"}


def test_a_crash_during_a_step_loses_and_repeats_nothing(
    make_harness: MakeHarness, untrained: Weights
) -> None:
    harness, spared = early(make_harness), early(make_harness, "spared", streaming=False)
    for each in (harness, spared):
        each.agents.group("a", [1.0, 0.0])
        assert not each.trainer.run_once()
    harness = harness.restart()
    for each in (harness, spared):
        each.agents.group("b", [0.0, 1.0], context_ids=OTHER)
        while not each.trainer.run_once():
            pass
    assert_moved_alike(harness.weights(), spared.weights(), untrained)
    assert set(harness.session_codes().values()) == {"trained"}


@pytest.mark.parametrize(
    ("recipe", "early"),
    [
        ({}, True),
        ({"advantage": "rloo"}, True),
        ({"epochs": 2}, True),
        ({"streaming": False}, False),
        ({"advantage": "liteppo"}, False),
        ({"advantage": {"name": "reinforce_pp_baseline"}}, False),
        ({"masks": [{"name": "m2po"}]}, False),
        ({"correction": {"name": "tis_token", "normalise": True}}, False),
        ({"advantage": "gae"}, False),
    ],
)
def test_recipes_that_need_the_whole_step_do_not_learn_early(recipe: dict[str, Any], early: bool) -> None:
    assert AlgorithmSettings(**recipe).learns_early == early
