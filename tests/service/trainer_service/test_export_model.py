"""`weir export-model`: what was published is a directory that transformers loads, or nothing is there."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tolerances import ulps
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.peft_models import peft_model
from tests.support.weir.commands import Told, weir

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}


def exported(harness: Harness, out: Path, *options: str) -> Told:
    policies = ["--policies-dir", str(harness.store.directory)]
    return weir("export-model", str(out), *policies, "--run-dir", str(harness.root), *options)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "a whole model"),
        ({"lora": LORA}, "a whole model"),
        ({"lora": LORA, "transport": "adapter"}, "adapter"),
    ],
    ids=["weights", "merged", "adapter"],
)
def test_transformers_loads_what_was_trained(
    make_harness: MakeHarness, tmp_path: Path, settings: dict[str, Any], kind: str
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    harness = make_harness(**settings).start()
    harness.step("g")
    harness.step("h")
    out = tmp_path / "my-model"
    told = exported(harness, out)
    assert told.status == 0, told.err
    assert f"{out} is version 2 (step 2)" in told.out
    assert kind in told.out
    if kind == "adapter":
        loaded = AutoPeftModelForCausalLM.from_pretrained(out).merge_and_unload()
        assert weights_of(peft_model(harness.settings.model_path, out).merge_and_unload())
    else:
        loaded = AutoModelForCausalLM.from_pretrained(out)
        for name in ("tokenizer.json", "config.json"):
            assert (out / name).read_bytes() == (harness.settings.model_path / name).read_bytes()
    trained = {each.name: each.value for each in harness.policy.snapshot().tensors}
    for name, tensor in weights_of(loaded).items():
        bound = ulps(LORA["rank"] + 2, of=float(tensor.abs().max()))
        torch.testing.assert_close(tensor, trained[name].float(), atol=bound, rtol=0)


def test_it_is_all_there_or_nothing(
    make_harness: MakeHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness().start()
    harness.step("g")
    harness.step("h")
    out = tmp_path / "there" / "model"

    def refuses(_: int) -> None:
        raise OSError(28, "No space left on device")

    def refused(sentence: str, *options: str) -> None:
        told = exported(harness, out, *options)
        assert (told.status, sentence in told.err) == (1, True), told.err
        assert not out.exists() or not [*out.iterdir()], "nothing is left"
        assert not out.parent.exists() or {*out.parent.iterdir()} <= {out}

    refused("has no version 7: it has 1, 2 (trainer.keep_policies says how many are kept)", "--version", "7")
    weights = harness.store.path_of(2) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused("model.safetensors is not what was published, by its digest")
    weights.unlink()
    refused("could not be copied")
    weights.write_bytes(whole)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuses)
        refused("No space left on device")
    out.mkdir()
    assert exported(harness, out, "--version", "1").status == 0, "an empty directory may be there"
    assert "version 1" in exported(harness, tmp_path / "second", "--version", "1").out
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    assert exported(harness, Path()).status == 0, "the directory in which one is"
    assert (here / "config.json").is_file()
    again = exported(harness, out)
    assert (again.status, "is not empty: name a new directory" in again.err) == (1, True)
    assert (out / "config.json").is_file()
