"""Several optimizer updates from the mini-batches of one step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_service.harness import MakeHarness
from tests.support.trainer_service.random_rows import POISON, MakeLearner, in_groups, random_rows
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    differs_by,
)
from trainer_service.rows.mini_batches import mini_batches
from trainer_service.rows.rows import Row
from trainer_service.step.step_request import StepRequest

pytestmark = pytest.mark.numeric

CLIP_LOW, CLIP_HIGH, DUAL_CLIP, CAP = 0.2, 0.28, 3.0, 2.0
HALVES: dict[str, Any] = {"mini_batches": 2, "epochs": 2, "max_tokens": 64}


@pytest.mark.parametrize(
    ("sizes", "count", "split"),
    [
        ([2, 3, 2, 1], 2, [[0, 1, 2, 3, 4], [5, 6, 7]]),
        ([2, 3, 2], 2, [[0, 1, 2, 3, 4], [5, 6]]),
        ([4, 4], 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([3], 8, [[0], [1], [2]]),
        ([3], 1, [[0, 1, 2]]),
    ],
)
def test_mini_batches_have_whole_groups_or_else_whole_rollouts(
    sizes: list[int], count: int, split: list[list[int]]
) -> None:
    assert [at.tolist() for at in mini_batches(in_groups(0, sizes), count)] == split


def test_the_branches_of_a_rollout_stay_in_one_mini_batch() -> None:
    rows = [replace(row, session_id=f"s{at // 3}") for at, row in enumerate(random_rows(0, 6))]
    assert [at.tolist() for at in mini_batches(rows, 4)] == [[0, 1, 2], [3, 4, 5]]


def plain_updates(model: Any, batches: list[list[Row]], epochs: int) -> list[float]:
    """Train the model in a plain loop, row by row. Returns the loss of each update."""

    def logprobs(row: Row) -> torch.Tensor:
        ids = torch.from_numpy(row.ids_L)
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, ids[1:, None])[:, 0][torch.from_numpy(row.mask_L)[1:] == 1]  # type: ignore[no-any-return]

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=WELL_CONDITIONED["lr"], betas=(0.9, 0.95), weight_decay=0.0
    )
    with torch.no_grad():
        begin = {row.session_id: logprobs(row) for batch in batches for row in batch}
    losses = []
    for _ in range(epochs):
        for batch in batches:
            tokens = sum(row.trained_tokens for row in batch)
            total = torch.zeros(())
            for row in batch:
                now_T, begin_T = logprobs(row), begin[row.session_id]
                weight_T = (begin_T - torch.from_numpy(row.logprobs_L[row.mask_L == 1])).exp().clamp(max=CAP)
                ratio_T, advantage = (now_T - begin_T).exp(), row.advantage
                loss_T = torch.maximum(
                    -ratio_T * advantage, -ratio_T.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage
                )
                if advantage < 0:
                    loss_T = loss_T.clamp(max=-DUAL_CLIP * advantage)
                total = total + (weight_T * loss_T).sum() / tokens
            optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), WELL_CONDITIONED["max_grad_norm"])
            optimizer.step()
            losses.append(float(total.detach()))
    return losses


def test_the_updates_are_those_of_a_plain_loop(
    make_learner: MakeLearner, untrained: Weights, model_path: Path
) -> None:
    """Two epochs over two mini-batches are four updates; *begin* is from before the first of them."""
    from transformers import AutoModelForCausalLM

    rows = in_groups(1, [2, 3, 2, 1])
    model = AutoModelForCausalLM.from_pretrained(model_path)
    losses = plain_updates(model, [rows[:5], rows[5:]], epochs=2)
    given = {"optimizer": WELL_CONDITIONED, "algorithm": HALVES}
    one = make_learner(**given)
    told = one.leader.optimise(StepRequest(rows, 0, one.settings.algorithm))
    assert told["loss"] == pytest.approx(sum(losses[:2]) / 2, abs=1e-6)
    assert_moved_alike(model.state_dict(), one.exported(), untrained)
    assert (
        max(float((model.state_dict()[name] - one.exported()[name]).abs().max()) for name in untrained) < 1e-6
    )


def test_a_mini_batch_learns_as_a_step_of_its_rows_alone(make_learner: MakeLearner) -> None:
    """The weights and the loss of an update do not depend on the rows of the other one. Two steps of one
    update each are the same as one step of two, if nothing depends on *begin*."""
    way = {"loss": "reinforce", "correction": "none", "masks": [], "aggregation": {"mode": "rollout_mean"}}
    rows = in_groups(2, [2, 3, 2, 1])
    joint = make_learner(algorithm=way | {"mini_batches": 2}, optimizer=WELL_CONDITIONED)
    apart = make_learner(algorithm=way, optimizer=WELL_CONDITIONED)
    told = joint.leader.optimise(StepRequest(rows, 0, joint.settings.algorithm))
    each = [
        apart.leader.optimise(StepRequest(part, 0, apart.settings.algorithm)) for part in (rows[:5], rows[5:])
    ]
    assert told["loss"] == pytest.approx(sum(one["loss"] for one in each) / 2, rel=1e-6)
    assert told["grad_norm"] == max(one["grad_norm"] for one in each)
    assert differs_by(joint.exported(), apart.exported()) == 0


def test_a_later_mini_batch_without_a_finite_gradient_ends_the_step(make_learner: MakeLearner) -> None:
    learner = make_learner(algorithm={"mini_batches": 2, "epochs": 2})
    rows = [*in_groups(1, [2, 2]), *(replace(row, session_id=f"p{row.session_id}") for row in poisoned())]
    told = learner.leader.optimise(StepRequest(rows, 0, learner.settings.algorithm))
    assert told["updates"] == 1
    assert not told["grad_norm"] < float("inf")


def poisoned() -> list[Row]:
    return [replace(row, group_id="p") for row in random_rows(2, 2, POISON)]


def lesson(harness: Any, name: str) -> dict[str, float]:
    for index, (first, value) in enumerate(((10, 1.0), (11, 0.0)) * 2):
        output = [first, 20, 21, 1]
        harness.agents.episode(f"{name}-{index}", value, output_ids=output, version=harness.trainer.version)
    assert harness.trainer.run_once()
    return harness.shared_state.snapshot.metrics  # type: ignore[no-any-return]


def test_a_critic_makes_as_many_updates_and_the_step_one_version(make_harness: MakeHarness) -> None:
    """Each update advances the schedules of both: after the two updates of the first step, both rates are
    0."""
    algorithm = {"advantage": "gae", "min_live_rows": 4, "mini_batches": 2}
    falling = {"lr": 1e-2, "warmup_steps": 0, "schedule": "linear", "total_steps": 2}
    harness = make_harness(algorithm=algorithm, critic={"optimizer": falling}, optimizer=falling).start()

    def weights() -> list[torch.Tensor]:
        modules = (harness.policy.module, harness.policy.critic.module)
        return [
            torch.cat([each.detach().flatten() for each in module.parameters()]).clone() for module in modules
        ]

    before = weights()
    said = lesson(harness, "a")
    after = weights()
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert said["critic/value_mean"] == 0.0  # the values are from before the first update
    assert said["early_frac"] == 0
    assert harness.trainer.version == 1
    lesson(harness, "b")
    assert all(torch.equal(*pair) for pair in zip(after, weights(), strict=True))
