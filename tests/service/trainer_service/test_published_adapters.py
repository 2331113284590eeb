"""Transport `adapter`: a version is the trained adapter alone; its sum with the base is what was trained."""

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from rollout_queue.contract.policies.policy import MANIFEST, STABLE, Manifest
from rollout_server.settings import EngineLoraSettings
from rollout_server.weights.verify import ExpectedModel, verify_directory
from tests.support.tolerances import ulps
from tests.support.trainer_service.harness import Harness, MakeHarness
from trainer_service.settings import TrainerSettings

LORA = {"rank": 4, "alpha": 8.0}
OPTIMIZER = {"lr": 1e-2, "warmup_steps": 0}


def adapted(make_harness: MakeHarness, **settings: object) -> Harness:
    return make_harness(transport="adapter", lora=LORA, optimizer=OPTIMIZER, **settings).start()


def manifest_of(directory: Path) -> Manifest:
    return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_version_is_the_adapter_alone_and_a_rollout_server_takes_it(
    make_harness: MakeHarness, stage: int
) -> None:
    harness = adapted(make_harness, zero_stage=stage)
    harness.step("g")
    directory = harness.store.path_of(1)
    names = {"adapter_config.json", "adapter_model.safetensors", MANIFEST, STABLE}
    assert {path.name for path in directory.iterdir()} == names
    manifest = manifest_of(directory)
    assert manifest.is_adapter
    for file in manifest.files:
        content = (directory / file.name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.size, file.sha256)
    model = ExpectedModel.of(harness.settings.model_path, EngineLoraSettings(max_rank=4))
    verify_directory(directory, manifest, model)


@pytest.mark.numeric
def test_the_base_with_the_published_adapter_is_what_was_trained(make_harness: MakeHarness) -> None:
    harness = adapted(make_harness)
    harness.step("g")
    harness.step("h")
    factors = load_file(harness.store.path_of(2) / "adapter_model.safetensors")
    assert any(float(factor.abs().max()) > 0 for name, factor in factors.items() if "lora_B" in name)
    merged = load_file(harness.settings.model_path / "model.safetensors")
    for name in [name for name in factors if ".lora_A." in name]:
        layer = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        delta = factors[name.replace("lora_A", "lora_B")] @ factors[name]
        merged[layer] = merged[layer] + LORA["alpha"] / LORA["rank"] * delta
    whole = {each.name: each.value for each in harness.policy.snapshot().tensors}
    assert merged.keys() == whole.keys()
    for name, tensor in whole.items():
        # A sum of the base and `rank` products, in an order that may differ.
        bound = ulps(LORA["rank"] + 2, of=float(tensor.abs().max()))
        torch.testing.assert_close(merged[name].float(), tensor.float(), atol=bound, rtol=0)


def test_whole_weights_are_published_once_every_server_refuses_an_adapter(make_harness: MakeHarness) -> None:
    harness = adapted(make_harness)
    harness.gateway.server_ok = False
    harness.step("g")
    harness.step("h")  # it hears meanwhile that version 1 was refused
    assert [manifest_of(harness.store.path_of(v)).is_adapter for v in (1, 2)] == [True, False]
    assert (harness.store.path_of(2) / "model.safetensors").exists()
    assert (harness.store.path_of(2) / "config.json").exists()
    harness.gateway.server_ok = True
    harness.step("i")
    assert not manifest_of(harness.store.path_of(3)).is_adapter


@pytest.mark.parametrize("has_results", [True, False])
def test_adapters_go_on_after_a_push_that_failed(
    make_harness: MakeHarness, caplog: pytest.LogCaptureFixture, has_results: bool
) -> None:
    """The server may take the next version: its disk was full, or it was starting again."""
    harness = adapted(make_harness)
    harness.gateway.server_ok = harness.gateway.refuses = False
    harness.gateway.has_results = has_results
    harness.step("g")
    harness.step("h")  # it hears meanwhile that the push of version 1 has failed
    assert manifest_of(harness.store.path_of(2)).is_adapter
    assert "no server took version 1" in caplog.text
    assert "version 1 is served" not in caplog.text


def test_adapters_are_published_only_if_they_are_trained(model_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"transport: adapter needs trainer\.lora"):
        TrainerSettings(model_path=model_path, transport="adapter")
