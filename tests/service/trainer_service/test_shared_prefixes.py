"""A prefix that rows share is computed once, and each row has the result and gradient that it has alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tolerances import ulps
from tests.support.trainer_service.device import DEVICE
from tests.support.trainer_service.model_families import FAMILIES, Family, made
from tests.support.trainer_service.random_rows import MakeLearner, OneRankLearner
from tests.support.trainer_service.related_rows import related_rows, row_with
from tests.support.trainer_service.same_training import (
    WELL_CONDITIONED,
    Weights,
    assert_moved_alike,
    same_metrics,
)
from trainer_service.model.attention.packed_attention import Packing, packing_of
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.rows.packing import FEWEST_SHARED
from trainer_service.rows.rows import MicroBatch, micro_batches
from trainer_service.step.step_request import StepRequest

pytestmark = pytest.mark.numeric

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


def test_a_long_part_that_needs_a_mask_has_blocks_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in SHARING[:2]:  # without and with a window
        made(family, tmp_path)
        model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
        (batch,) = micro_batches(related_rows(roots=1, branches=2, tips=2), 1000, share_prefixes=True)
        lp_T = scores(model, batch, packing_of(model), DEVICE)[0].detach()
        with monkeypatch.context() as patch:
            patch.setattr("trainer_service.model.attention.attention_kernels.BLOCK", 7)
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
