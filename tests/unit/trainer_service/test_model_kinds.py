"""Models of all kinds are computed exactly, packed or one row a pass, or they are refused in a sentence."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tolerances import ulps
from tests.support.trainer_service.model_families import FAMILIES, Family, made
from tests.support.trainer_service.model_kinds import CPU, VARIANTS, Tried, kinds, table, try_kind
from trainer_service.model.huggingface import ModelUnfit, load_model
from trainer_service.model.packed_attention import Packing, packing_of
from trainer_service.model.self_check import check_model, small_part

ROUNDINGS = 240
"""A gradient is a sum over so many tokens."""
TELLING = {
    "llama": "packed",
    "qwen3": "packed",
    "gemma2": "packed",
    "falcon": "one row a pass",  # builds no mask from positions
    "phimoe (window)": "one row a pass",  # keeps its window of 16 in its mask only
    "nemotron": "one row a pass",  # does not pass the bounds of rows on
    "phi3 (longrope)": "one row a pass",  # its frequencies depend on the longest row of the pass
    "gpt_neo": "one row a pass",  # has a mask for one row of its longest length
    "inkling_text": "one row a pass",  # pads its vocabulary
    "bert": "refused",
}
"""Kinds that fail in different ways, and what becomes of them."""


def assert_right_or_refused(tried: Tried) -> None:
    assert tried.difference <= ulps(ROUNDINGS), tried
    assert tried.checked or re.fullmatch(r"\w+ cannot be trained: .+", tried.sentence), tried


@pytest.mark.parametrize(("name", "outcome"), TELLING.items())
def test_a_kind_has_the_values_and_gradients_of_plain_torch_or_is_refused(
    name: str, outcome: str, tmp_path: Path
) -> None:
    tried = try_kind(name, tmp_path)
    assert_right_or_refused(tried)
    assert tried.outcome == outcome, tried.sentence


@pytest.mark.long
def test_every_kind_is_right_or_refused_as_the_table_says(tmp_path: Path) -> None:
    tried = []
    for name in kinds():
        tried.append(try_kind(name, tmp_path / name))
        assert_right_or_refused(tried[-1])
    page = Path(__file__).parents[3] / "results/model_kinds.md"
    assert "\n".join(table(tried)) in page.read_text(encoding="utf-8")


def test_a_scale_of_logits_that_is_a_formula_is_not_taken_for_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VARIANTS, "formula", ("mpt", {"logit_scale": "inv_sqrt_d_model"}))
    tried = try_kind("formula", tmp_path)
    assert_right_or_refused(tried)
    assert tried.checked is not None


def test_a_model_that_gives_nan_is_refused_in_a_sentence_that_says_it(tmp_path: Path) -> None:
    model = family_model("Llama", tmp_path)
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    with pytest.raises(ModelUnfit, match=r"cannot be trained: .*it gives NaN, so its weights are not finite"):
        check_model(model, CPU)


def family_model(name: str, directory: Path) -> Any:
    family = next(each for each in FAMILIES if each.name == name)
    made(family, directory)
    return load_model(directory, torch.float32)


@pytest.mark.parametrize("name", ["Gemma3Text", "Bloom"])
def test_a_check_leaves_the_model_and_the_random_generators_as_they_were(name: str, tmp_path: Path) -> None:
    model = family_model(name, tmp_path)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = model.config.to_dict(), str(model), torch.get_rng_state(), random.getstate()
    packing = packing_of(model)
    checked = check_model(model, CPU)
    assert (model.config.to_dict(), str(model)) == before[:2]
    assert packing_of(model) is packing
    assert torch.equal(torch.get_rng_state(), before[2])
    assert random.getstate() == before[3]
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None} == {}
    assert [each.check for each in checked.checks] == ["packing", "head"]


def test_the_small_part_has_a_layer_of_each_kind_and_short_windows(tmp_path: Path) -> None:
    kinds_of_layers = ["full_attention"] * 3 + ["sliding_attention"] + ["full_attention"] * 8
    options = {"num_hidden_layers": 12, "layer_types": kinds_of_layers, "sliding_window": 4096}
    made(Family("Qwen3", options | {"use_sliding_window": True}), tmp_path)
    model = load_model(tmp_path, torch.float32)
    with small_part(model) as layers:
        assert (len(layers), len(model.model.layers)) == (4, 4)
        assert (model.config.sliding_window, layers[3].self_attn.sliding_window) == (16, 16)
    assert len(model.model.layers) == 12
    assert (model.config.sliding_window, model.model.layers[3].self_attn.sliding_window) == (4096, 4096)


def test_one_rank_that_finds_a_difference_decides_for_all(tmp_path: Path) -> None:
    """The checks are: that no token reads later ones, the head, the packing."""
    model = family_model("Llama", tmp_path)
    of_all = iter([True, True, False])
    checked = check_model(model, CPU, agree=lambda mine: mine and next(of_all))
    assert checked.packing is Packing.ONE_ROW
    assert packing_of(model) is Packing.POSITIONS, "of its own attention"
    copy = load_model(tmp_path, torch.float32)
    checked.apply(copy)
    assert packing_of(copy) is Packing.POSITIONS


@pytest.mark.parametrize("change", ["halved", "cut", "fails"])
def test_a_head_that_would_differ_is_found_at_the_start(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model halves its logits, leaves some out, or changes one that the head does not return."""
    model = family_model("Llama", tmp_path)
    whole = model.forward

    def changing(**inputs: Any) -> Any:
        result = whole(**inputs)
        if change == "halved":
            result.logits = result.logits / 2
        elif change == "cut":
            result.logits = result.logits[..., :50]
        else:
            result.logits[..., 60] = -torch.inf
        return result

    monkeypatch.setattr(model, "forward", changing)
    checked = check_model(model, CPU)
    (head,) = (each for each in checked.checks if each.check == "head")
    expected = (50, False, "right") if change == "cut" else (None, True, "differs")
    assert (checked.columns, checked.needs_all_logits, head.outcome) == expected, head.detail
    assert checked.packing is Packing.SEGMENTS
