"""The policy under DeepSpeed: the engine's logprobs, AdamW's steps, an export that can be served."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_queue.contract.policies.policy import MANIFEST, STABLE, Manifest, sha256_of
from tests.support.tolerances import ulps
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.trainer_service.made_rows import rows_of
from tests.support.trainer_service.same_training import WELL_CONDITIONED, Weights, assert_moved_alike
from trainer_service.rows.rows import micro_batches

pytestmark = pytest.mark.numeric


def sampled(harness: Harness, session_id: str, seed: int, temperature: float) -> list[dict[str, Any]]:
    """Two turns of a session as an engine gives them: sampled and scored one token at a time."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    turns: list[dict[str, Any]] = []
    for number in range(2):
        context = torch.randint(2, 64, (5,), generator=generator).tolist()
        ids += context
        output, logprobs = [], []
        for _ in range(8):
            with torch.no_grad():
                logits = harness.policy.module(torch.tensor([ids])).logits[0, -1] / temperature
            lp = logits.log_softmax(-1)
            token = int(torch.multinomial(lp.exp(), 1, generator=generator))
            ids.append(token)
            output.append(token)
            logprobs.append(float(lp[token]))
        fields = {"turn_id": f"{session_id}-{number}", "parent_id": f"{session_id}-0" if number else None}
        sample = {"context_ids": context, "output_ids": output, "logprobs": logprobs}
        turns.append({**fields, **sample, "temperature": temperature})
    return turns


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_fresh_rollout_has_the_engines_logprobs_and_ratio_one(
    make_harness: MakeHarness, temperature: float
) -> None:
    harness = make_harness().start()
    for seed, value in enumerate((1.0, 0.0)):
        session_id = f"s{seed}"
        harness.agents.open(session_id, "g", 2)
        harness.agents.call(
            *(turn(session_id, **fields) for fields in sampled(harness, session_id, seed, temperature))
        )
        harness.agents.finish(session_id, value)
    assert harness.trainer.run_once()
    metrics = json.loads((harness.root / "metrics.jsonl").read_text())
    # Sums of 64 products at most; no log-probability of 64 tokens is far beyond -ln 64.
    assert metrics["mismatch/abs_logp"] < ulps(64, of=math.log(64))
    assert metrics["mismatch/ess"] == pytest.approx(1, abs=ulps(64, of=math.log(64)))
    assert metrics["ppo/ratio_mean"] == 1.0
    assert metrics["is/masked_frac"] == metrics["ppo/clip_hi"] == metrics["ppo/dual"] == 0
    assert (metrics["rows"], metrics["tokens"], metrics["staleness/total_max"]) == (2, 32, 0)


def test_a_step_is_a_step_of_plain_adamw(
    make_harness: MakeHarness, untrained: Weights, model_path: Path
) -> None:
    """Gradients are about as large as AdamW's epsilon, so that the second moment affects the step."""
    from transformers import AutoModelForCausalLM

    harness = make_harness(optimizer=WELL_CONDITIONED | {"warmup_steps": 2}).start()
    model = AutoModelForCausalLM.from_pretrained(model_path)
    lr, max_norm = WELL_CONDITIONED["lr"], WELL_CONDITIONED["max_grad_norm"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    (batch,) = micro_batches(rows_of("s1", [turn()], ["t1"]), 100)
    for rate in (0.5 * lr, lr, lr):
        harness.policy.backward(-harness.policy.logprobs(batch)[0].mean())
        harness.policy.step()
        logits = model(torch.from_numpy(batch.ids_N)[None]).logits[0, torch.from_numpy(batch.predict_at_T)]
        targets = torch.from_numpy(batch.targets_T)
        torch.nn.functional.cross_entropy(logits, targets).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    assert_moved_alike(model.state_dict(), harness.weights(), untrained)


def test_a_step_does_not_depend_on_how_its_rows_are_packed(
    make_harness: MakeHarness, untrained: Weights
) -> None:
    made = []
    for max_tokens in (10_000, 1):
        packed = {"max_tokens": max_tokens}
        harness = make_harness(f"run-{max_tokens}", algorithm=packed, optimizer=WELL_CONDITIONED).start()
        harness.agents.group("g", [1.0, 0.0, 0.5])
        assert harness.trainer.run_once()
        made.append(harness.weights())
    assert_moved_alike(made[0], made[1], untrained)


def test_a_published_version_is_complete_and_matches_its_manifest(harness: Harness, model_path: Path) -> None:
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    (announced,) = harness.gateway.announced
    directory = harness.store.path_of(1)
    assert announced["location"] == directory.as_uri()
    assert announced["manifest_sha256"] == sha256_of(directory / MANIFEST)
    assert (directory / STABLE).exists()
    manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    assert (manifest.version, manifest.step) == (1, 1)
    for spec in manifest.files:
        assert spec.sha256 == sha256_of(directory / spec.name)
        assert spec.size == (directory / spec.name).stat().st_size
    assert {"config.json", "generation_config.json", "tokenizer.json"} < {
        spec.name for spec in manifest.files
    }
    exported, base = load_file(directory / "model.safetensors"), load_file(model_path / "model.safetensors")
    assert exported.keys() == base.keys()
    (weights,) = (spec for spec in manifest.files if spec.tensors)
    assert {t.name: (t.shape, t.dtype) for t in weights.tensors} == {
        name: (list(tensor.shape), "F32") for name, tensor in base.items()
    }
    assert all(torch.equal(tensor, harness.weights()[name]) for name, tensor in exported.items())


def test_a_bfloat16_model_is_trained_in_float32_and_published_in_bfloat16(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).save_pretrained(half)
    harness = make_harness(model_path=half).start()
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    assert harness.weights()["model.norm.weight"].dtype == torch.float32
    exported = load_file(harness.store.path_of(1) / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}


def test_a_policy_in_bfloat16_trains(make_harness: MakeHarness) -> None:
    harness = make_harness(dtype="bfloat16").start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    again = harness.restart()
    assert all(torch.equal(t, again.weights()[name]) for name, t in harness.weights().items())


def test_old_versions_and_checkpoints_are_removed(make_harness: MakeHarness) -> None:
    harness = make_harness(keep_policies=2, keep_checkpoints=2).start()
    for group_id in "abcd":
        harness.agents.group(group_id, [1.0, 0.0])
        assert harness.trainer.run_once()
    assert harness.store.versions() == [3, 4]
    # Version 1 has no score yet, and may become the best.
    assert sorted(harness.checkpoints.versions()) == [1, 3, 4]
    assert harness.restart().trainer.step == 4


def test_a_version_holds_no_file_that_a_rollout_server_refuses(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(model_path, odd)
    for name in ("modeling_odd.py", ".gitattributes", "a note.txt", "old.ckpt"):
        (odd / name).write_text("#", encoding="utf-8")
    harness = make_harness(model_path=odd).start()
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    published = {path.name for path in harness.store.path_of(1).iterdir()}
    assert published == {path.name for path in model_path.iterdir()} | {MANIFEST, STABLE}


def test_a_half_written_version_is_written_again(harness: Harness) -> None:
    leftover = harness.store.path_of(1)
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert harness.store.versions() == []
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    assert load_file(leftover / "model.safetensors")


def test_a_checkpoint_brings_back_the_random_generators(harness: Harness) -> None:
    torch.rand(5)  # a restart sets the seed too, so the state must differ from it
    harness.agents.group("g", [1.0, 0.0])
    harness.trainer.run_once()
    expected = torch.rand(3)
    again = harness.restart()
    assert torch.equal(torch.rand(3), expected)
    assert again.trainer.step == 1


def test_a_model_that_cannot_be_published_is_refused_at_the_start(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path
) -> None:
    """The file lacks a tensor of the model. transformers loads it with random numbers, and a warning."""
    directory = tmp_path / "lacking"
    shutil.copytree(model_path, directory)
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=r"no tensor model\.norm\.weight"):
        make_harness(model_path=directory)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_a_model_with_quantized_weights_is_refused_by_name(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """As FP8 and MXFP4 (pairs of 4-bit values in bytes) are stored."""
    directory = tmp_path / "quantized"
    shutil.copytree(model_path, directory)
    weights = load_file(directory / "model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    save_file(weights | {name: weights[name].to(dtype)}, directory / "model.safetensors")
    with pytest.raises(SystemExit, match=rf"{re.escape(name)} in (F8_E4M3|U8), and quantized"):
        make_harness(model_path=directory)
