"""A step that accumulates gradients of groups as they arrive equals a step of all groups at once. A group
whose gradient is not finite ends, and the others train as if it had never come."""

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

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
from tests.support.trainer_service.steps import AGGREGATIONS
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.rows import rows
from trainer_service.rows.rows import Row
from trainer_service.step.group_trainer import Diverged
from trainer_service.step.quarantine import non_finite_groups
from trainer_service.step.step_parts import StepRequest
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.run_state import RunState

pytestmark = pytest.mark.numeric


def grouped(seed: int, count: int = 8, **fields: Any) -> list[Row]:
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
    for seed, parts in enumerate([(4,), (4, 4), ()]):  # the second step has no rows left to add
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


def is_discarded(learner: OneRankLearner) -> None:
    learner.leader.accumulate(StepRequest(grouped(2), 0, learner.settings.algorithm))
    learner.leader.discard_gradients()
    learner.leader.discard_gradients()  # there are no gradients to discard


def is_spoilt_by_a_part(learner: OneRankLearner) -> None:
    poisoned = grouped(2, temperature=POISON)
    learner.leader.accumulate(StepRequest(poisoned, 0, learner.settings.algorithm))
    told = learner.learn(4)
    assert told["updates"] == 0
    assert not told["grad_norm"] < float("inf")


def is_not_finite(learner: OneRankLearner) -> None:
    """The rows at fault are found, and the policy can be exported."""
    leader, algorithm = learner.leader, learner.settings.algorithm
    assert not learner.learn(2, temperature=POISON)["grad_norm"] < float("inf")
    assert not leader.gradient_is_finite(StepRequest(random_rows(2, 3, POISON), 0, algorithm))
    assert leader.gradient_is_finite(StepRequest(random_rows(2, 3), 0, algorithm))
    assert leader.weights_are_finite()
    assert learner.exported()


IN_VAIN = [
    (is_discarded, 0),
    (is_discarded, 2),
    (is_spoilt_by_a_part, 1),
    (is_not_finite, 1),
    (is_not_finite, 3),
]


@pytest.mark.parametrize(
    ("gradient", "stage"),
    cases(
        IN_VAIN,
        long=[
            (gradient, stage)
            for gradient in (is_discarded, is_spoilt_by_a_part, is_not_finite)
            for stage in range(4)
            if (gradient, stage) not in IN_VAIN
        ],
    ),
)
def test_a_gradient_that_is_dropped_changes_nothing(
    make_learner: MakeLearner, gradient: Callable[[OneRankLearner], None], stage: int
) -> None:
    spared, struck = (make_learner(zero_stage=stage, optimizer=WELL_CONDITIONED) for _ in range(2))
    for learner in (spared, struck):
        learner.learn(1)
    gradient(struck)
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


@pytest.fixture
def poisonous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's temperature is the one of its sampling, also where an engine would sample greedily: that is how
    these tests bring about a gradient that is not finite."""
    monkeypatch.setattr(rows, "temperature_of_logprobs", lambda used: used.get("temperature", 1.0))


def early(make_harness: MakeHarness, name: str = "run", **algorithm: Any) -> Harness:
    return make_harness(name, algorithm=EARLY | algorithm, optimizer=WELL_CONDITIONED).start()


Pair = tuple[Harness, Harness]


@pytest.fixture
def both(make_harness: MakeHarness) -> Pair:
    """A trainer that learns early, and a patient one, each with a group that waits for another."""
    pair = early(make_harness), early(make_harness, "patient", streaming=False)
    for each in pair:
        each.agents.group("a", [1.0, 0.0])
        assert not each.trainer.run_once()
        assert not each.trainer.run_once()
    return pair


def assert_same_step(both: Pair, untrained: Weights, *more: str) -> None:
    """The second group comes, and further ones; the step is that of the patient trainer."""
    for each in both:
        each.agents.group("b", [0.0, 1.0], context_ids=OTHER)
        for name in more:
            each.agents.group(name, [1.0, 0.0])
        assert any(each.trainer.run_once() for _ in range(3))
    harness, patient = both
    names = ("tokens", "rows", "loss", "grad_norm", "adv/std", "reward_mean", "mismatch/kl")
    assert {name: harness.told[name] for name in names} == same_metrics(
        {name: patient.told[name] for name in names}
    )
    assert_moved_alike(harness.weights(), patient.weights(), untrained)
    assert set(harness.session_codes().values()) == {"trained"}
    assert harness.told["tokens"] == 12


def test_the_trainer_learns_from_a_group_while_it_waits_for_another(both: Pair, untrained: Weights) -> None:
    harness, patient = both
    assert harness.waits_for.endswith("; 6 tokens are already learned")
    assert_same_step(both, untrained)
    assert (harness.told["early_frac"], patient.told["early_frac"]) == (0.5, 0.0)
    harness.agents.group("c", [1.0, 0.0])
    harness.step("d")
    assert harness.told["early_frac"] == 0.0


def test_a_crash_during_a_step_loses_and_repeats_nothing(both: Pair, untrained: Weights) -> None:
    harness, patient = both
    assert_same_step((harness.restart(), patient), untrained)


def test_an_early_group_may_be_deleted(both: Pair, untrained: Weights) -> None:
    for each in both:
        for session_id in ("a-0", "a-1"):
            each.agents.delete(session_id)
    assert_same_step(both, untrained, "c")


def test_a_second_reward_of_an_early_group_is_in_the_step(both: Pair, untrained: Weights) -> None:
    for each in both:
        each.agents.reward("a-1", 3.0, key="later")
        assert not each.trainer.run_once()
    harness, _ = both
    assert "learned" not in harness.waits_for, "after a change, nothing is learned early until the next step"
    assert_same_step(both, untrained)
    for group in ("c", "d"):
        harness.agents.group(group, [1.0, 0.0])
        harness.trainer.run_once()
    assert harness.told["early_frac"] == 0.5, "the next step learns early again"


def test_an_early_group_is_in_the_step_although_newer_groups_come(make_harness: MakeHarness) -> None:
    harness = early(make_harness, max_rows=4)
    harness.agents.group("a", [1.0, 0.0], at=300.0)
    assert not harness.trainer.run_once()
    for newer, at in (("b", 400.0), ("c", 401.0)):
        harness.agents.group(newer, [1.0, 0.0], at=at)
    assert harness.trainer.run_once()
    assert harness.told["early_frac"] == 0.5
    codes = harness.session_codes()
    assert (codes["a-0"], codes["b-0"], codes["c-0"]) == ("trained", None, "trained")


@pytest.mark.usefixtures("poisonous")
def test_an_early_group_without_a_finite_gradient_is_found(make_harness: MakeHarness) -> None:
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


def test_a_group_that_fills_no_pass_waits_for_others(make_harness: MakeHarness) -> None:
    harness = early(make_harness, max_tokens=13)
    harness.agents.group("a", [1.0, 0.0])
    assert not harness.trainer.run_once()
    assert "learned" not in harness.waits_for


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


def optimizer_state(harness: Harness) -> dict[str, torch.Tensor]:
    """The optimizer's state in a checkpoint: all that the next step depends on besides the weights."""
    harness.policy.copy_states().write(harness.root / "looked-at")
    (path,) = (harness.root / "looked-at").glob("*optim_states.pt")
    state = torch.load(path, weights_only=False)
    shutil.rmtree(harness.root / "looked-at")
    found: dict[str, torch.Tensor] = {}

    def walk(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value.clone()
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}.{key}", inner)
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                walk(f"{name}.{index}", inner)

    walk("", state)
    assert any("exp_avg" in name for name in found)
    return found


@pytest.mark.usefixtures("poisonous")
def test_a_group_without_a_finite_gradient_ends_invalid_and_the_others_train(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(algorithm={"min_live_rows": 6}).start()
    harness.agents.group("a", [1.0, 0.0])
    harness.agents.group("poison", [1.0, 0.0], temperature=POISON)
    harness.agents.group("b", [1.0, 0.0])
    assert not harness.trainer.run_once()
    codes = harness.session_codes()
    assert (codes["poison-0"], codes["poison-1"], codes["a-0"], codes["b-0"]) == ("invalid",) * 2 + (
        None,
    ) * 2
    verdict = harness.verdict("poison-0")
    assert verdict.detail == "its gradient is not finite at version 0"
    assert harness.stream.heads["poison-0"].turn_verdicts["poison-0-t"] == verdict
    harness.step("c")
    assert harness.session_codes() == codes | dict.fromkeys(
        ("a-0", "a-1", "b-0", "b-1", "c-0", "c-1"), "trained"
    )
    assert not harness.pending


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("poisonous")
def test_weights_and_optimizer_are_bitwise_what_they_are_without_that_group(
    make_harness: MakeHarness, dtype: str
) -> None:
    spared, struck = (make_harness(name, dtype=dtype).start() for name in ("spared", "struck"))
    for harness in (spared, struck):
        harness.step("a")
    before = struck.weights(), optimizer_state(struck)
    struck.agents.group("poison", [1.0, 0.0], temperature=POISON)
    assert not struck.trainer.run_once()
    assert differs_by(before[0], struck.weights()) == 0
    assert differs_by(before[1], optimizer_state(struck)) == 0
    for harness in (spared, struck):
        harness.agents.group("b", [0.0, 1.0, 1.0])
        assert harness.trainer.run_once()
    assert differs_by(spared.weights(), struck.weights()) == 0
    assert differs_by(optimizer_state(spared), optimizer_state(struck)) == 0


@pytest.mark.usefixtures("poisonous")
def test_a_restart_does_not_train_the_batch_again(harness: Harness) -> None:
    harness.agents.group("poison", [1.0, 0.0], temperature=POISON)
    assert not harness.trainer.run_once()
    harness = harness.restart()
    assert not harness.trainer.run_once()
    assert harness.stream.counts["session:invalid"] == 2
    assert harness.trainer.step == 0


def test_a_later_epoch_that_fails_ends_the_run_and_the_group(make_harness: MakeHarness) -> None:
    """The weights contain the batch's first epoch, and only the checkpoint has the former weights."""
    harness = make_harness(algorithm={"epochs": 2}).start()
    norms = itertools.chain([1.0], itertools.repeat(float("inf")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.policy, "step", lambda scale=1.0: next(norms))
        harness.agents.group("g", [1.0, 0.0])
        with pytest.raises(Diverged, match="update 2"):
            harness.trainer.run_once()
    assert set(harness.session_codes().values()) == {"invalid"}
    assert harness.ledger == []
    harness = harness.restart()
    harness.step("h")
    assert harness.session_codes()["h-0"] == "trained"


def test_weights_that_were_not_finite_before_the_step_end_no_group(harness: Harness) -> None:
    with torch.no_grad():
        next(harness.policy.module.parameters()).fill_(float("nan"))
    harness.agents.group("g", [1.0, 0.0])
    with pytest.raises(Diverged, match="the weights are not finite"):
        harness.trainer.run_once()
    assert harness.session_codes() == {"g-0": None, "g-1": None}
    assert harness.restart().trainer.run_once()


@pytest.mark.parametrize(
    ("bad", "expected"),
    [([], []), ([{3}], [3]), ([{0}, {6}], [0, 6]), ([{1, 2}], [1, 2]), ([{0, 6}], [0, 1, 2, 3, 4, 5, 6])],
)
def test_non_finite_groups_are_found_by_bisection(bad: Sequence[set[int]], expected: list[int]) -> None:
    """If two groups spoil a batch only together, the groups between them are blamed, too."""

    def sound(groups: Sequence[int]) -> bool:
        return not any(each <= set(groups) for each in bad)

    assert non_finite_groups(range(7), sound) == expected
