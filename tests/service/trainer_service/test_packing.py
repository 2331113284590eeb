"""Rows are packed tightly and shared evenly among ranks, and loss and gradient do not depend on the packs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tolerances import FLOAT64, ulps
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.random_rows import row_of
from trainer_service.model.sharding.parallel import Parallel
from trainer_service.model.sharding.sequence_ranks import SequenceRanks
from trainer_service.rows.rows import MicroBatch, Row, balanced_shares, micro_batches

pytestmark = pytest.mark.numeric

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


def test_a_rank_that_took_a_costly_pass_takes_a_cheaper_one_next() -> None:
    assert balanced_shares([3, 8, 7, 4], 2) == [[1, 0], [2, 3]]


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


@pytest.fixture
def policy_gradient(make_harness: MakeHarness) -> "Gradient":
    return Gradient(make_harness())


class Gradient:
    """The mean of -logprob · advantage over the trained tokens, and its gradient by plain autograd."""

    def __init__(self, harness: Harness) -> None:
        self._policy = harness.policy

    def __call__(self, rows: list[Row], max_tokens: int) -> tuple[float, torch.Tensor]:
        parameters = list(self._policy.module.parameters())
        total, flat = 0.0, torch.zeros(sum(each.numel() for each in parameters))
        tokens = sum(row.trained_tokens for row in rows)
        for batch in micro_batches(rows, max_tokens):
            lp_T, _ = self._policy.logprobs(batch)
            loss = -(lp_T * torch.from_numpy(batch.advantages_T)).sum() / tokens
            total += float(loss.detach())
            flat += torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
        return total, flat


@pytest.mark.parametrize("max_tokens", [1, 50, 90])
def test_neither_loss_nor_gradient_depend_on_the_packs(policy_gradient: Gradient, max_tokens: int) -> None:
    rows = [row_of(length, seed) for seed, length in enumerate([5, 17, 2, 9, 30, 4, 9, 9, 44])]
    loss, gradient = policy_gradient(rows, 10_000)
    other_loss, other_gradient = policy_gradient(rows[::-1], max_tokens)
    assert gradient.abs().max() > 1e-2
    positions = sum(len(row.ids_L) for row in rows)  # loss and gradient are sums over them, in another order
    assert other_loss == pytest.approx(loss, rel=ulps(positions))
    assert (gradient - other_gradient).abs().max() < ulps(positions, of=float(gradient.abs().max()))
