"""Packed rows through the attention of real architectures: no row sees another, and each is as if alone."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.tolerances import BFLOAT16, ulps
from tests.trainer_service.test_packing import row_of
from trainer_service.model.forward import forward
from trainer_service.model.packed_attention import Packing, packing_of
from trainer_service.model.policy import load_model
from trainer_service.rows.rows import MicroBatch, Row, micro_batches

pytestmark = pytest.mark.numeric

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
CAPS = {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.2}
EXPERTS = {"num_local_experts": 1, "num_experts_per_tok": 1}
"""One: how many tokens an expert multiplies at a time changes their last bits."""


@dataclass(frozen=True)
class Family:
    name: str
    options: dict[str, Any]
    packing: Packing = Packing.SEGMENTS


FAMILIES = [
    Family("Qwen3", {}),
    Family("Qwen3", LAYERS | {"use_sliding_window": True, "tie_word_embeddings": True}),
    Family("Llama", {}),
    Family("Mistral", {"sliding_window": 6}),
    Family("Gemma2", LAYERS | CAPS),
    Family("Gemma3Text", LAYERS),
    Family("GptOss", LAYERS | EXPERTS),
    Family("Cohere", {"logit_scale": 3.0}),
    Family("Granite", {"logits_scaling": 0.25}),
    Family("Lfm2", {"layer_types": ["conv", "full_attention"]}, Packing.ONE_ROW),
    Family("Bloom", {"n_head": 4, "n_layer": 2}, Packing.ONE_ROW),
]


def made(family: Family, directory: Path) -> Any:
    """A random model of the family, as transformers runs it."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{family.name}Config")(**SMALL | family.options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    model.save_pretrained(directory)
    return model.eval()


def scored(model: Any, batch: MicroBatch) -> torch.Tensor:
    lp_T, entropy_T = forward(model, batch, packing_of(model), torch.device("cpu"))
    return torch.stack([lp_T, entropy_T], 1).detach()


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
    model = load_model(tmp_path, torch.float32).eval()
    assert packing_of(model) is family.packing
    rows = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17, 2, 9])]
    (batch,) = micro_batches(rows, 1000)
    expected = torch.cat([alone(plain, rows[int(one.rows_T[0])]) for one in batch.single_rows()])
    # Sums of up to 48 products, some of them in another order.
    torch.testing.assert_close(
        scored(model, batch), expected, atol=ulps(SMALL["intermediate_size"], of=largest(expected)), rtol=0
    )
    assert "computed at once" not in caplog.text, "the head is ours in every family"


def test_no_token_of_a_row_changes_a_bit_of_another(family: Family, tmp_path: Path) -> None:
    made(family, tmp_path)
    model = load_model(tmp_path, torch.float32).eval()
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
    model = load_model(tmp_path, torch.float32).eval()
    rows = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17])]
    (batch,) = micro_batches(rows, 1000)
    tokens = len(batch.targets_T)
    gradients = []
    for passes in ((batch,), batch.single_rows()):
        model.zero_grad()
        for one in passes:
            lp_T, _ = forward(model, one, packing_of(model), torch.device("cpu"))
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
    model = load_model(tmp_path, torch.bfloat16).eval()
    rows = [row_of(length, seed) for seed, length in enumerate([23, 9, 9, 17])]
    (batch,) = micro_batches(rows, 1000)
    apart = torch.cat([scored(model, one) for one in batch.single_rows()])
    # A kernel may round once more where it is given more positions.
    torch.testing.assert_close(
        scored(model, batch), apart, atol=ulps(1, of=largest(apart), unit=BFLOAT16), rtol=0
    )


def test_a_model_that_loses_the_bounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.float32).eval()
    whole = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *a, segments, **rest: whole(*a, **rest))
    (batch,) = micro_batches([row_of(9)], 1000)
    with pytest.raises(RuntimeError, match="does not hand the bounds of packed rows to its attention"):
        scored(model, batch)


def test_an_attention_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.float32).eval()
    model.model.layers[0].self_attn.is_causal = False
    (batch,) = micro_batches([row_of(9)], 1000)
    with pytest.raises(ValueError, match="Qwen3Attention asks for attention that packed rows do not support"):
        scored(model, batch)
