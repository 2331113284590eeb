"""Packed rows in the attention of real architectures: each row gets the same result as alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tolerances import BFLOAT16, ulps
from tests.support.trainer_service.device import DEVICE
from tests.support.trainer_service.model_families import FAMILIES, SMALL, Family, made
from tests.support.trainer_service.random_rows import row_of
from trainer_service.model.attention.packed_attention import packing_of
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.rows.rows import MicroBatch, Row, micro_batches

pytestmark = pytest.mark.numeric


def scored(model: Any, batch: MicroBatch) -> torch.Tensor:
    lp_T, entropy_T, _ = scores(model, batch, packing_of(model), DEVICE)
    return torch.stack([lp_T, entropy_T], 1).detach().cpu()


def largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def alone(plain: Any, row: Row) -> torch.Tensor:
    """log p and entropy of a row's trained tokens, by transformers and log_softmax."""
    at = np.flatnonzero(row.mask_L)
    logits = plain(torch.from_numpy(row.ids_L)[None], use_cache=False).logits[0, at - 1].detach()
    lp_TV = (logits / torch.from_numpy(row.temperatures_L[at])[:, None]).log_softmax(-1)
    lp_T = lp_TV[torch.arange(len(at)), torch.from_numpy(row.ids_L[at])]
    return torch.stack([lp_T, -(lp_TV.exp() * lp_TV).sum(-1)], 1)


@pytest.fixture(params=FAMILIES, ids=lambda family: f"{family.name}-{len(family.options)}")
def family(request: pytest.FixtureRequest) -> Family:
    given: Family = request.param
    return given


def test_packed_rows_are_scored_as_transformers_scores_each_alone(
    family: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = made(family, tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    assert packing_of(model) is family.packing
    rows = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17, 2, 9])]
    (batch,) = micro_batches(rows, 1000)
    expected = torch.cat([alone(plain, rows[int(one.rows_T[0])]) for one in batch.single_rows()])
    # Sums of up to 48 products, some of them in another order.
    torch.testing.assert_close(
        scored(model, batch), expected, atol=ulps(SMALL["intermediate_size"], of=largest(expected)), rtol=0
    )
    assert "computed at once" not in caplog.text, "every family gets the trainer's own head"


def test_no_plan_is_made_for_each_length_of_row(tmp_path: Path) -> None:
    """cuDNN's attention plans each new length, for longer than it takes to compute."""
    made(FAMILIES[0], tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_model(tmp_path, torch.bfloat16)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_no_row_changes_a_bit_of_another(family: Family, tmp_path: Path) -> None:
    made(family, tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    rows = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17])]
    (batch,) = micro_batches(rows, 1000)
    before = scored(model, batch)
    for changed in range(4):
        others = list(rows)
        others[changed] = replace(rows[changed], ids_L=2 + (rows[changed].ids_L + 7) % 60)
        (other,) = micro_batches(others, 1000)
        after = scored(model, other)
        elsewhere = torch.from_numpy(batch.rows_T != changed)
        assert torch.equal(after[elsewhere], before[elsewhere])
        assert not torch.equal(after[~elsewhere], before[~elsewhere])


def test_a_row_has_the_gradient_that_it_has_alone(family: Family, tmp_path: Path) -> None:
    made(family, tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    rows = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17])]
    (batch,) = micro_batches(rows, 1000)
    tokens = len(batch.targets_T)
    gradients = []
    for passes in ((batch,), batch.single_rows()):
        model.zero_grad()
        for one in passes:
            lp_T, *_ = scores(model, one, packing_of(model), DEVICE)
            (lp_T.sum() / tokens).backward()  # type: ignore[no-untyped-call]
        gradients.append(
            {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        )
    together, apart = gradients
    assert together.keys() == apart.keys()
    for name, gradient in together.items():  # each is a sum over all positions of all rows
        allowed = ulps(len(batch.ids_N), of=largest(apart[name]))
        torch.testing.assert_close(gradient, apart[name], atol=allowed, rtol=0, msg=name)


def test_a_pack_of_half_precision_is_scored_as_each_row_alone(tmp_path: Path) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.bfloat16).eval().to(DEVICE)
    rows = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17])]
    (batch,) = micro_batches(rows, 1000)
    apart = torch.cat([scored(model, one) for one in batch.single_rows()])
    # A kernel may round once more where it is given more positions.
    torch.testing.assert_close(
        scored(model, batch), apart, atol=ulps(1, of=largest(apart), unit=BFLOAT16), rtol=0
    )


def test_a_model_that_loses_the_bounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    whole = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *a, segments, **rest: whole(*a, **rest))
    (batch,) = micro_batches([row_of(9)], 1000)
    with pytest.raises(RuntimeError, match="does not pass the bounds of packed rows to its attention"):
        scored(model, batch)


def test_an_attention_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.float32).eval().to(DEVICE)
    model.model.layers[0].self_attn.is_causal = False
    (batch,) = micro_batches([row_of(9)], 1000)
    with pytest.raises(ValueError, match="Qwen3Attention asks for attention that packed rows do not support"):
        scored(model, batch)
