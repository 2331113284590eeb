"""Trees of turns become rows that train each sampled token once. Packed rows do not see each other, and a
prefix that rows share is computed once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import SessionSpec, Turn
from tests.support.tolerances import FLOAT64, ulps
from tests.support.trainer_service.device import DEVICE
from tests.support.trainer_service.harness import Harness, turn
from tests.support.trainer_service.made_rows import rows_of
from tests.support.trainer_service.model_families import FAMILIES, Family, made
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner, row_of
from tests.support.trainer_service.related_rows import related_rows, row_with
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    same_metrics,
)
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.packed_attention import Packing, packing_of
from trainer_service.model.parallel import Parallel, SequenceRanks
from trainer_service.rows.packing import FEWEST_SHARED
from trainer_service.rows.rows import MicroBatch, Row, balanced_shares, micro_batches, planned_rows
from trainer_service.step.step_parts import StepRequest

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


def test_packed_rows_do_not_see_each_other(harness: Harness) -> None:
    rows = [row_of(length, seed=length) for length in (5, 17, 2, 9, 30, 4)]
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


LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def rows_in(batches: list[MicroBatch]) -> list[tuple[list[int], set[int]]]:
    """Ids and number of every row, wherever it was put."""
    return [
        (one.ids_N.tolist(), set(one.rows_T.tolist())) for batch in batches for one in batch.single_rows()
    ]


@given(LENGTHS, st.integers(1, 150))
def test_every_row_is_packed_whole_once_and_under_its_number(lengths: list[int], max_tokens: int) -> None:
    rows = [row_of(length, seed) for seed, length in enumerate(lengths)]
    batches = list(micro_batches(rows, max_tokens))
    assert sorted(rows_in(batches), key=lambda pair: min(pair[1])) == [
        (row.ids_L.tolist(), {number}) for number, row in enumerate(rows)
    ]
    for batch in batches:
        assert batch.lengths_S.sum() == len(batch.ids_N)
        assert len(batch.ids_N) <= max_tokens or len(batch.lengths_S) == 1
        assert np.flatnonzero(batch.positions_N == 0).tolist() == [0, *batch.lengths_S.cumsum()[:-1]]
        assert (batch.ids_N[batch.predict_at_T + 1] == batch.targets_T).all()


@given(LENGTHS, st.integers(60, 150))
def test_no_row_would_fit_into_an_earlier_pack(lengths: list[int], max_tokens: int) -> None:
    batches = list(micro_batches([row_of(length) for length in lengths], max_tokens))
    for number, batch in enumerate(batches):
        for later in batches[number + 1 :]:
            assert batch.lengths_S.sum() + later.lengths_S.min() > max_tokens


def test_the_same_rows_make_the_same_packs() -> None:
    rows = [row_of(length, seed) for seed, length in enumerate([7, 9, 7, 9, 7, 3])]
    packs = [[sorted(numbers) for _, numbers in rows_in([batch])] for batch in micro_batches(rows, 20)]
    assert packs == [[[1], [3]], [[0], [2], [5]], [[4]]]


@given(st.lists(st.floats(1, 100), min_size=1, max_size=60), st.integers(1, 8))
def test_ranks_get_as_many_passes_and_nearly_the_same_work(costs: list[float], ranks: int) -> None:
    shares = balanced_shares(costs, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    work = [sum(costs[index] for index in share) for share in shares]
    assert max(work) - min(work) <= max(costs) + ulps(len(costs), of=sum(costs), unit=FLOAT64)


def test_attention_makes_one_long_row_cost_more_than_many_short_ones() -> None:
    (long,), (short,) = (
        list(micro_batches([row_of(length)] * count, 64)) for length, count in ((64, 1), (8, 8))
    )
    assert long.cost(even_at=64) == 128
    assert short.cost(even_at=64) == 72
    assert sum(one.cost(even_at=64) for one in short.single_rows()) == 72


def test_a_rank_fills_up_its_share_with_the_cheapest_pass() -> None:
    batches = list(micro_batches([row_of(length) for length in (30, 20, 10)], 1))

    def share(parallel: Parallel) -> list[tuple[int, bool]]:
        return [(len(batch.ids_N), counts) for batch, counts in parallel.own_share(batches, even_at=64)]

    assert share(Parallel(0, 2, None)) == [(30, True), (10, False)]
    assert share(Parallel(1, 2, None)) == [(20, True), (10, True)]
    for rank in (2, 3):  # two ranks compute a micro-batch together
        assert share(Parallel(rank, 4, SequenceRanks(2, rank % 2, None))) == [(20, True), (10, True)]


def loss_and_gradient(harness: Harness, rows: list[Row], max_tokens: int) -> tuple[float, torch.Tensor]:
    """The mean of -logprob · advantage over the trained tokens, and its gradient by plain autograd."""
    parameters = list(harness.policy.module.parameters())
    total, flat = 0.0, torch.zeros(sum(each.numel() for each in parameters))
    tokens = sum(row.trained_tokens for row in rows)
    for batch in micro_batches(rows, max_tokens):
        lp_T, _ = harness.policy.logprobs(batch)
        loss = -(lp_T * torch.from_numpy(batch.advantages_T)).sum() / tokens
        total += float(loss.detach())
        flat += torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
    return total, flat


def test_neither_loss_nor_gradient_depend_on_the_packs(harness: Harness) -> None:
    rows = [row_of(length, seed) for seed, length in enumerate([5, 17, 2, 9, 30, 4, 9, 9, 44])]
    loss, gradient = loss_and_gradient(harness, rows, 10_000)
    assert gradient.abs().max() > 1e-2
    positions = sum(len(row.ids_L) for row in rows)  # loss and gradient are sums over them, in another order
    for max_tokens in (1, 50, 90):
        other_loss, other_gradient = loss_and_gradient(harness, rows[::-1], max_tokens)
        assert other_loss == pytest.approx(loss, rel=ulps(positions)), max_tokens
        bound = ulps(positions, of=float(gradient.abs().max()))
        assert (gradient - other_gradient).abs().max() < bound, max_tokens


SHARING = [family for family in FAMILIES if family.packing is Packing.SEGMENTS]


def history_of(batch: MicroBatch, at: int) -> list[int]:
    """The ids that the model reads up to position `at` of the pack, from the row's first on."""
    ends = batch.lengths_S.cumsum()
    segment = int(np.searchsorted(ends, at, side="right"))
    ids = batch.ids_N[ends[segment] - batch.lengths_S[segment] : at + 1].tolist()
    while (segment := int(batch.parents_S[segment])) >= 0:
        ids = [*batch.ids_N[ends[segment] - batch.lengths_S[segment] : ends[segment]].tolist(), *ids]
    return [int(each) for each in ids]


BRANCHING = st.lists(
    st.lists(st.integers(2, 3), min_size=2, max_size=100).map(lambda ids: [2] * (len(ids) // 2) + ids),
    min_size=1,
    max_size=12,
)
"""Rows of only two ids that begin with the same one: they share prefixes of all lengths."""


@given(BRANCHING, st.integers(1, 500))
def test_every_token_is_predicted_from_its_own_history(rows_of_ids: list[list[int]], most: int) -> None:
    rows = [row_with(np.array(ids), seed) for seed, ids in enumerate(rows_of_ids)]
    seen: list[int] = []
    for batch in micro_batches(rows, most, share_prefixes=True):
        numbers = batch.rows_T.tolist()
        for row in dict.fromkeys(numbers):
            of_row = batch.rows_T == row
            at_L = np.flatnonzero(rows[row].mask_L)
            assert batch.targets_T[of_row].tolist() == rows[row].ids_L[at_L].tolist()
            for at, place in zip(at_L, batch.predict_at_T[of_row], strict=True):
                history = history_of(batch, int(place))
                assert history == rows[row].ids_L[:at].tolist()
                assert batch.positions_N[place] == at - 1
        seen += dict.fromkeys(numbers)
        alone = len(batch.parents_S) == 1 and len(set(numbers)) == 1
        assert len(batch.ids_N) <= most or alone
    assert sorted(seen) == list(range(len(rows)))


def test_each_shared_token_is_computed_once() -> None:
    rows = related_rows(roots=2, branches=3, tips=4)
    (batch,) = micro_batches(rows, 10_000, share_prefixes=True)
    tails = sum(len(row) - 80 for row in rows)
    # Two tails may begin with the same tokens.
    assert len(batch.ids_N) <= 2 * 40 + 6 * 40 + tails
    assert sum(len(each.ids_N) for each in micro_batches(rows, 10_000)) == 24 * 80 + tails


def test_a_prefix_of_few_tokens_is_computed_again() -> None:
    rows = related_rows(roots=1, branches=2, tips=1, shared=FEWEST_SHARED - 1)
    (batch,) = micro_batches(rows, 10_000, share_prefixes=True)
    assert batch.parents_S.tolist() == [-1, -1]


def test_a_family_that_is_too_large_becomes_several_packs_that_each_share() -> None:
    rows = related_rows(roots=1, branches=1, tips=40)
    batches = list(micro_batches(rows, 200, share_prefixes=True))
    assert all(len(batch.ids_N) <= 200 for batch in batches)
    # A tail has at most 19 tokens, so 6 tails fit beside the prefix of 80.
    assert len(batches) <= 7


def gradients(model: Any, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """The gradient of the sum of log p, each token weighted by its advantage and place in the row."""
    model.zero_grad()
    for batch in batches:
        lp_T, *_ = scores(model, batch, packing_of(model), DEVICE)
        (lp_T * torch.from_numpy(batch.advantages_T).to(DEVICE)).sum().backward()  # type: ignore[no-untyped-call]
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", SHARING, ids=lambda family: f"{family.name}-{len(family.options)}")
def test_every_architecture_gives_shared_rows_what_each_has_alone(family: Family, tmp_path: Path) -> None:
    made(family, tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    rows = related_rows(roots=1, branches=2, tips=2)
    (shared,), apart = micro_batches(rows, 1000, share_prefixes=True), list(micro_batches(rows, 1))
    assert len(shared.ids_N) < sum(len(batch.ids_N) for batch in apart) / 2

    def scored(batch: MicroBatch) -> dict[int, torch.Tensor]:
        pair = torch.stack(scores(model, batch, packing_of(model), DEVICE)[:2], 1).detach().cpu()
        return {int(row): pair[torch.from_numpy(batch.rows_T == row)] for row in set(batch.rows_T)}

    together, alone = scored(shared), {row: pair for batch in apart for row, pair in scored(batch).items()}
    assert together.keys() == alone.keys() == set(range(4))
    for row, pair in alone.items():
        # Sums of up to 48 products, some of them in another order.
        allowed = ulps(48, of=float(pair.abs().max()))
        torch.testing.assert_close(together[row], pair, atol=allowed, rtol=0)
    one, other = gradients(model, [shared]), gradients(model, apart)
    for name, gradient in other.items():  # each is a sum over all positions of all rows
        positions = sum(len(row) for row in rows)
        allowed = ulps(positions, of=float(gradient.abs().max()))
        torch.testing.assert_close(one[name], gradient, atol=allowed, rtol=0, msg=name)


def test_a_row_changes_no_bit_of_its_sibling(tmp_path: Path) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    rows = related_rows(roots=1, branches=1, tips=3)
    changed = replace(rows[1], ids_L=np.append(rows[1].ids_L[:-1], 2 + (rows[1].ids_L[-1] + 7) % 60))
    before, after = (
        next(micro_batches(each, 1000, share_prefixes=True)) for each in (rows, [rows[0], changed, rows[2]])
    )
    one, other = (scores(model, batch, packing_of(model), DEVICE)[0].cpu() for batch in (before, after))
    for row in range(3):
        same = torch.equal(
            one[torch.from_numpy(before.rows_T == row)], other[torch.from_numpy(after.rows_T == row)]
        )
        assert same == (row != 1)


def test_a_long_part_has_its_mask_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in SHARING[:2]:  # without and with a window
        made(family, tmp_path)
        model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
        (batch,) = micro_batches(related_rows(roots=1, branches=2, tips=2), 1000, share_prefixes=True)
        lp_T = scores(model, batch, packing_of(model), DEVICE)[0].detach()
        with monkeypatch.context() as patch:
            patch.setattr("trainer_service.model.packed_attention.BLOCK", 7)
            in_blocks_T = scores(model, batch, packing_of(model), DEVICE)[0].detach()
        torch.testing.assert_close(in_blocks_T, lp_T, atol=ulps(48, of=float(lp_T.abs().max())), rtol=0)


def steps_of(learner: OneRankLearner) -> list[dict[str, float]]:
    """The metrics of three steps on rows that share prefixes."""
    algorithm = learner.settings.algorithm
    steps = [related_rows(roots=1, branches=2, tips=2, seed=seed) for seed in range(3)]
    return [learner.leader.optimise(StepRequest(rows, 0, algorithm)) for rows in steps]


OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 3": {"zero_stage": 3},
    "LoRA": {"lora": {"rank": 4}},
    "recomputed": {"activation_checkpointing": True},
    "reference": {"algorithm": {"max_tokens": 512, "kl": {"coefficient": 0.1}}},
    "critic": {"critic": {}, "algorithm": {"max_tokens": 512, "advantage": {"name": "gae"}}},
}
IN_LONG = ("stage 3", "reference")
"""Two ranks do the former in the short run too."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.long if name in IN_LONG else ())
        for name, options in OPTIONS.items()
    ],
)
def test_a_policy_learns_the_same_from_rows_that_share_prefixes(
    make_learner: MakeLearner, untrained: Weights, options: dict[str, Any]
) -> None:
    common = {"algorithm": {"max_tokens": 512}, "optimizer": WELL_CONDITIONED} | options
    sharing, apart = (make_learner(share_prefixes=shares, **common) for shares in (True, False))
    for one, other in zip(steps_of(sharing), steps_of(apart), strict=True):
        assert one.pop("computed_per_token") < other.pop("computed_per_token") / 2
        assert one == same_metrics(other)
    assert_moved_alike(sharing.exported(), apart.exported(), untrained)
