"""Trees of turns become rows that train each sampled token once, and packed rows do not see each other."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import SessionSpec, Turn
from tests.support.tolerances import ulps
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.trainer_service.made_rows import rows_of
from trainer_service.algorithms.policy_loss import policy_loss
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.algorithms.tokens import Tokens
from trainer_service.rows.rows import MicroBatch, Row, micro_batches, planned_rows
from trainer_service.step.step_parts import counts_of

pytestmark = pytest.mark.numeric


def all_ids(turns: list[Turn]) -> list[str]:
    return [each.turn_id for each in turns]


@st.composite
def trees(draw: st.DrawFn) -> list[Turn]:
    """A session of up to eight turns. Each continues any earlier turn or none. No two outputs share an id."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *all_ids(turns)]))
        length = draw(st.integers(0, 3))
        turns.append(
            turn(
                turn_id=f"t{number}",
                parent_id=parent,
                context_ids=[1] * draw(st.integers(0 if parent else 1, 3)),
                output_ids=[100 + 10 * number + i for i in range(length)],
                started_at=draw(st.floats(0, 10)),
            )
        )
    return turns


@given(trees(), st.data())
def test_every_trainable_token_is_trained_exactly_once(turns: list[Turn], data: st.DataObject) -> None:
    trainable = data.draw(st.sets(st.sampled_from(all_ids(turns))))
    rows = rows_of("s1", turns, trainable)
    trained = sorted(token for row in rows for token in row.ids_L[row.mask_L == 1].tolist())
    assert trained == sorted(token for t in turns if t.turn_id in trainable for token in t.output_ids)
    assert sorted(turn_id for row in rows for turn_id in row.turn_ids) == sorted(
        t.turn_id for t in turns if t.turn_id in trainable and t.output_ids
    )


@given(trees(), st.data())
def test_an_export_trains_the_same_turns_in_the_same_branches(turns: list[Turn], data: st.DataObject) -> None:
    trainable = data.draw(st.sets(st.sampled_from(all_ids(turns))))
    head = SessionHead(spec=SessionSpec(session_id="s1", created_at=0.0), turns=tuple(turns))
    exported = [(branch.turns, branch.trained) for branch in head.trained_branches(trainable)]
    planned = planned_rows("s1", turns, trainable)
    assert exported == [(row.branch, frozenset(row.turn_ids)) for row in planned]


def test_a_shared_prefix_is_context_in_the_second_branch() -> None:
    turns = [
        turn(turn_id="a", context_ids=[2], output_ids=[10, 11], logprobs=[-1.0, -2.0]),
        turn(turn_id="b", parent_id="a", context_ids=[3], output_ids=[12], logprobs=[-3.0], started_at=101.0),
        turn(turn_id="c", parent_id="a", context_ids=[4], output_ids=[13], logprobs=[-4.0], started_at=102.0),
    ]
    first, second = rows_of("s1", turns, all_ids(turns))
    assert (first.ids_L.tolist(), first.mask_L.tolist()) == ([2, 10, 11, 3, 12], [0, 1, 1, 0, 1])
    assert (second.ids_L.tolist(), second.mask_L.tolist()) == ([2, 10, 11, 4, 13], [0, 0, 0, 0, 1])
    assert first.logprobs_L.tolist() == [0.0, -1.0, -2.0, 0.0, -3.0]
    assert second.versions_L.tolist() == [-1, -1, -1, -1, 0]


def test_a_temperature_of_zero_counts_as_one() -> None:
    rows = rows_of("s1", [turn(temperature=0.0)], ["t1"])
    assert set(rows[0].temperatures_L.tolist()) == {1.0}


def random_row(generator: np.random.Generator, length: int, advantage: float = 1.0) -> Row:
    mask = generator.integers(0, 2, length)
    mask[0], mask[-1] = 0, 1
    return Row(
        session_id="s",
        turn_ids=("t",),
        advantage=advantage,
        ids_L=generator.integers(0, 64, length),
        mask_L=mask,
        logprobs_L=(-4 * mask + generator.normal(size=length) * mask).astype(np.float32),
        versions_L=np.where(mask == 1, 0, -1),
        temperatures_L=np.full(length, 0.8, np.float32),
        turns_L=np.where(mask == 1, 0, -1),
        rewards_L=np.zeros(length, np.float32),
    )


@pytest.fixture
def rows() -> list[Row]:
    generator = np.random.default_rng(0)
    return [random_row(generator, length, (-1) ** length * 0.5) for length in (5, 17, 2, 9, 30, 4)]


def test_packed_rows_do_not_see_each_other(harness: Harness, rows: list[Row]) -> None:
    (packed,) = micro_batches(rows, 10_000)
    alone = list(micro_batches(rows, 1))
    assert len(alone) == len(rows)
    with torch.no_grad():
        together = harness.policy.logprobs(packed)[0]
        apart = torch.cat([harness.policy.logprobs(batch)[0] for batch in alone])
        uncut = MicroBatch(
            **(vars(packed) | {"lengths_S": np.array([len(packed.ids_N)]), "parents_S": np.array([-1])})
        )
        leaking = harness.policy.logprobs(uncut)[0]
    assert (together - apart).abs().max() < ulps(64, of=float(apart.abs().max()))  # sums of 64 products
    assert (leaking - apart).abs().max() > 1e-2


def gradient(harness: Harness, rows: list[Row], max_tokens: int) -> torch.Tensor:
    """The gradient of the whole step's loss by plain autograd."""
    harness.policy.module.zero_grad()
    counts = counts_of(rows)
    for batch in micro_batches(rows, max_tokens):
        module = harness.policy.module
        lp_new_T = harness.policy.logprobs(batch)[0]
        tokens = Tokens(
            lp_new_T=lp_new_T,
            lp_prox_T=lp_new_T.detach(),
            lp_roll_T=harness.policy.tensor(batch.logprobs_T),
            advantages_T=harness.policy.tensor(batch.advantages_T),
            rows_T=harness.policy.tensor(batch.rows_T),
        )
        loss = policy_loss(tokens, AlgorithmSettings(), counts).loss
        parts = torch.autograd.grad(loss, list(module.parameters()))
        for parameter, part in zip(module.parameters(), parts, strict=True):
            parameter.grad = part if parameter.grad is None else parameter.grad + part
    flat = torch.cat([p.grad.flatten() for p in harness.policy.module.parameters()])
    harness.policy.module.zero_grad()
    return flat


def test_the_gradient_does_not_depend_on_micro_batches_or_order(harness: Harness, rows: list[Row]) -> None:
    whole = gradient(harness, rows, 10_000)
    assert whole.abs().max() > 1e-3
    positions = sum(len(row.ids_L) for row in rows)  # each gradient is a sum over them
    for other in (gradient(harness, rows, 20), gradient(harness, rows, 1), gradient(harness, rows[::-1], 25)):
        assert (whole - other).abs().max() < ulps(positions, of=float(whole.abs().max()))


def test_a_row_without_advantage_has_no_gradient(harness: Harness, rows: list[Row]) -> None:
    silent = [Row(**(vars(row) | {"advantage": 0.0})) for row in rows]
    assert torch.count_nonzero(gradient(harness, silent, 40)) == 0


@given(st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_holes_between_trained_tokens_change_no_trained_token(holes: list[int]) -> None:
    """With context of another length between turns, the same tokens are trained with the same terms."""
    turns = [
        turn(
            turn_id=f"t{number}",
            parent_id=f"t{number - 1}" if number else None,
            context_ids=[2] * (1 + hole),
            output_ids=[10 + number, 20 + number],
            logprobs=[-1.0, -2.0],
        )
        for number, hole in enumerate(holes)
    ]
    (row,) = rows_of("s1", turns, all_ids(turns))
    (batch,) = micro_batches([row], 100)
    assert batch.targets_T.tolist() == [10, 20, 11, 21, 12, 22]
    assert batch.logprobs_T.tolist() == [-1.0, -2.0] * 3
    assert batch.ids_N[batch.predict_at_T + 1].tolist() == batch.targets_T.tolist()


def test_more_epochs_move_further_and_clip(make_harness: MakeHarness) -> None:
    harness = make_harness(algorithm={"epochs": 3}, optimizer={"lr": 0.05, "warmup_steps": 0}).start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    metrics = harness.shared_state.snapshot.metrics
    assert metrics["ppo/ratio_mean"] != 1.0
    assert metrics["ppo/clip_hi"] + metrics["ppo/clip_lo"] > 0
