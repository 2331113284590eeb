"""The policy under DeepSpeed: the logprobs of engines, also of rows with images, AdamW's steps, and exports
that can be served."""

import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.contract.published_policy import MANIFEST, STABLE, Manifest, sha256_of
from rollout_queue.contract.records import Turn, TurnImage
from tests.support.images import encoded, image_of
from tests.support.tiny_vision_model import FACTOR, make_tiny_vision_model
from tests.support.tolerances import ulps
from tests.support.trainer_service.device import DEVICE
from tests.support.trainer_service.harness import Harness, MakeHarness, turn
from tests.support.trainer_service.made_rows import rows_of
from tests.support.trainer_service.model_kinds import make_kind
from tests.support.trainer_service.random_rows import MakeLearner
from tests.support.trainer_service.same_training import WELL_CONDITIONED, Weights, assert_moved_alike
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.model.images import ImageInputs, image_inputs_of
from trainer_service.model.packed_attention import packing_of
from trainer_service.model.settings import CriticSettings, ModelSettings
from trainer_service.rows.rows import Row, contradiction, micro_batches

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
def test_a_fresh_rollout_has_the_engines_logprobs(make_harness: MakeHarness, temperature: float) -> None:
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
        assert harness.policy.learning_rate == pytest.approx(rate)
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


def test_a_version_has_no_file_that_servers_refuse(
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


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model.norm.weight": None}, r"no tensor model\.norm\.weight"),
        ({DOWN: torch.float8_e4m3fn}, rf"'{re.escape(DOWN)}': dtype F8_E4M3 is not one of"),
        ({DOWN: torch.uint8}, rf"'{re.escape(DOWN)}': is U8, and quantized"),
    ],
    ids=["a tensor is missing", "FP8", "MXFP4, pairs of 4-bit values in bytes"],
)
def test_a_model_that_cannot_be_published_is_refused_at_the_start(
    make_harness: MakeHarness,
    model_path: Path,
    tmp_path: Path,
    changed: dict[str, torch.dtype | None],
    why: str,
) -> None:
    """transformers loads a missing tensor with random numbers, and a warning."""
    directory = tmp_path / "changed"
    shutil.copytree(model_path, directory)
    weights = load_file(directory / "model.safetensors")
    for name, dtype in changed.items():
        former = weights.pop(name)
        if dtype is not None:
            weights[name] = former.to(dtype)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=why):
        make_harness(model_path=directory)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("nemotron", {"zero_stage": 3}), ("falcon", {"lora": {"rank": 4}})],
    ids=["nemotron, partitioned", "falcon, LoRA"],
)
def test_a_model_that_mixes_up_packed_rows_learns_from_one_row_a_pass(
    make_learner: MakeLearner,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    settings: dict[str, Any],
) -> None:
    """Its step is the same whether rows are packed or not, and one line of log says why."""
    make_kind(kind, tmp_path / "base")
    given = {"model_path": tmp_path / "base", "optimizer": WELL_CONDITIONED, **settings}
    after: list[Weights] = []
    for max_tokens in (1000, 1):
        learner = make_learner(**given, algorithm={"max_tokens": max_tokens})
        before = learner.exported()
        caplog.set_level("INFO", "trainer_service")
        metrics = learner.learn(1)
        assert math.isfinite(metrics["grad_norm"])
        after.append(learner.exported())
    assert_moved_alike(after[0], after[1], before)
    said = [each.message for each in caplog.records if "gets one row a pass: packed rows" in each.message]
    assert len(said) == 2


def test_a_model_that_reads_later_tokens_is_refused_at_the_start(
    make_learner: MakeLearner, tmp_path: Path
) -> None:
    make_kind("bert", tmp_path)
    why = "trainer.model_path: BertLMHeadModel cannot be trained: its tokens read later ones"
    with pytest.raises(SystemExit, match=re.escape(why)):
        make_learner(model_path=tmp_path)


SIZES = {"a": (96, 64), "b": (64, 128), "c": (96, 64), "d": (32, 64)}
PNGS = {name: encoded(image_of(*size, seed)) for seed, (name, size) in enumerate(SIZES.items())}
HASHES = {name: hashlib.sha256(png).hexdigest() for name, png in PNGS.items()}
STORE = {HASHES[name]: png for name, png in PNGS.items()}


@pytest.fixture(scope="module")
def vision_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def model(vision_path: Path) -> Any:
    return load_model(vision_path, torch.float32).to(DEVICE)


@pytest.fixture(scope="module")
def inputs(vision_path: Path, model: Any) -> ImageInputs:
    return ImageInputs(vision_path, model.config)


@pytest.fixture(scope="module")
def original(vision_path: Path) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(vision_path, dtype=torch.float32).eval()


def showing(pad: int, said: str, **fields: Any) -> Turn:
    """A turn whose context has a token for each letter of `said`, and the image of this name for capitals."""
    ids: list[int] = []
    images: list[TurnImage] = []
    for letter in said:
        if letter.islower():
            ids.append(ord(letter))
            continue
        width, height = SIZES[letter.lower()]
        tokens, grid = width * height // FACTOR**2, (1, height // 16, width // 16)
        images.append(TurnImage(HASHES[letter.lower()], len(ids), len(ids) + tokens, width, height, grid))
        ids += [pad] * tokens
    return turn(context_ids=TokenIds(ids), images=tuple(images), **fields)


def loaded(row: Row) -> Row:
    return replace(row, images=tuple(replace(each, png=STORE[each.place.sha256]) for each in row.images))


def rows(pad: int) -> list[Row]:
    """Four rows: of three images over two turns, of none, of one, and of equal ids with another image."""
    first = showing(pad, "xAy", turn_id="t1")
    second = showing(pad, "zBzDw", turn_id="t2", parent_id="t1", output_ids=[20, 21, 22, 1])
    made = rows_of("s1", [first, second], ["t1", "t2"])
    for number, said in enumerate(("xyz", "Aq", "Cq")):
        made += rows_of(f"s{number + 2}", [showing(pad, said, turn_id="t")], ["t"])
    return [loaded(row) for row in made]


def alone(original: Any, path: Path, row: Row, pad: int) -> Tensor:
    """log p [T] of the row's trained tokens, as transformers computes them."""
    ids_1L = torch.from_numpy(row.ids_L)[None]
    given: dict[str, Any] = {"mm_token_type_ids": (ids_1L == pad).int()}
    if row.images:
        images = [image_of(*SIZES[name], list(SIZES).index(name)) for name in names_of(row)]
        given |= AutoImageProcessor.from_pretrained(path)(images=images, return_tensors="pt")
    with torch.no_grad():
        lp_LV = original(input_ids=ids_1L, **given).logits[0].log_softmax(-1)
    at = torch.from_numpy(np.flatnonzero(row.mask_L))
    lp_T: Tensor = lp_LV[at - 1, ids_1L[0, at]]
    return lp_T


def names_of(row: Row) -> list[str]:
    by_hash = {sha256: name for name, sha256 in HASHES.items()}
    return [by_hash[image.place.sha256] for image in row.images]


def packed_logprobs(model: Any, inputs: ImageInputs, rows: list[Row]) -> Tensor:
    (batch,) = micro_batches(rows, 10_000)
    with torch.no_grad():
        lp_T, *_ = scores(model, batch, packing_of(model), DEVICE, images=inputs)
    order_T = np.argsort(batch.rows_T, kind="stable")
    return lp_T.cpu()[torch.from_numpy(order_T)]


def test_packed_rows_with_images_have_the_logprobs_of_each_row_alone(
    model: Any, inputs: ImageInputs, original: Any, vision_path: Path
) -> None:
    made = rows(inputs.rule.pad)
    expected = torch.cat([alone(original, vision_path, row, inputs.rule.pad) for row in made])
    found = packed_logprobs(model, inputs, made)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    other = replace(made[2], images=made[3].images)
    assert (packed_logprobs(model, inputs, [other]) - found[-6:-3]).abs().max() > 1e-3


def test_convolutions_of_float32_are_not_rounded_to_tf32(vision_path: Path) -> None:
    """On a GPU, cuDNN computes the embeddings of patches; on CPU the setting changes nothing."""
    torch.backends.cudnn.allow_tf32 = True
    load_model(vision_path, torch.float32)
    assert not torch.backends.cudnn.allow_tf32


def test_a_sampled_pad_is_no_image(model: Any, inputs: ImageInputs, original: Any, vision_path: Path) -> None:
    pad, stand_in = inputs.rule.pad, 500
    sampled = showing(pad, "xA", output_ids=[10, pad, 11, 1])
    (row,) = map(loaded, rows_of("s", [sampled], ["t1"]))
    with torch.no_grad():
        table = original.get_input_embeddings().weight
        former, table[stand_in] = table[stand_in].clone(), table[pad]
        ids_L = row.ids_L.copy()
        ids_L[row.mask_L == 1] = [10, stand_in, 11, 1]
        expected = alone(original, vision_path, replace(row, ids_L=ids_L), pad)
        table[stand_in] = former
    found = packed_logprobs(model, inputs, [row])
    torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 2, 3]], atol=2e-5, rtol=0)


def test_the_images_of_rows_keep_their_places_in_micro_batches(inputs: ImageInputs) -> None:
    pad = inputs.rule.pad
    made = rows(pad)
    assert [each.place.start for each in made[0].images] == [1, 12, 21]
    (batch,) = micro_batches(made, 10_000, share_prefixes=True)
    assert (batch.parents_S == -1).all()
    assert len(batch.images) == 5
    for part in (batch, *batch.single_rows()):
        spans = [range(each.place.start, each.place.end) for each in part.images]
        assert [at for span in spans for at in span] == np.flatnonzero(part.ids_N == pad).tolist()


def test_a_model_that_reads_no_images_makes_no_pass_over_them(model: Any, inputs: ImageInputs) -> None:
    (batch,) = micro_batches(rows(inputs.rule.pad), 10_000)
    with pytest.raises(RuntimeError, match="does not read the images"):
        scores(model, batch, packing_of(model), DEVICE)


def test_several_ranks_and_a_critic_train_no_images(model: Any, vision_path: Path) -> None:
    settings = ModelSettings(model_path=vision_path)
    assert image_inputs_of(model, settings, ranks=1) is not None
    assert image_inputs_of(model, settings, ranks=2) is None
    with_critic = settings.model_copy(update={"critic": CriticSettings()})
    assert image_inputs_of(model, with_critic, ranks=1) is None


def test_bytes_of_another_size_are_refused(model: Any, inputs: ImageInputs) -> None:
    row = rows(inputs.rule.pad)[2]
    other = replace(row, images=tuple(replace(each, png=PNGS["b"]) for each in row.images))
    with pytest.raises(ValueError, match="were recorded"):
        packed_logprobs(model, inputs, [other])


def test_turns_that_contradict_their_images_are_not_trained(inputs: ImageInputs) -> None:
    rule, good = inputs.rule, showing(inputs.rule.pad, "xAy")
    (image,) = good.images
    broken = [
        structs.replace(good, images=()),
        structs.replace(good, images=(structs.replace(image, end=image.end - 1),)),
        structs.replace(good, images=(image.moved(1),)),
        structs.replace(good, images=(structs.replace(image, grid=(1, 6, 4)),)),
        structs.replace(good, images=(structs.replace(image, width=64, height=96),)),
    ]
    assert contradiction([good], 1024, rule) is None
    assert all("image" in (contradiction([each], 1024, rule) or "") for each in broken)
    assert "does not train" in (contradiction([good], 1024) or "")


def play(harness: Any, pad: int, group: str, images: dict[str, bytes]) -> None:
    """A group of two sessions that show an image, and end with the rewards 1 and 0."""
    for number in range(2):
        name = f"{group}-{number}"
        harness.agents.open(name, group, 2)
        said = showing(pad, "xAy", session_id=name, turn_id=f"{name}-t", group_id=group)
        harness.agents.call(said, images=images)
        harness.agents.finish(name, float(1 - number))


def test_a_step_learns_from_images_and_ends_sessions_whose_images_are_gone(
    make_harness: Any, vision_path: Path
) -> None:
    harness = make_harness(model_path=vision_path).start()
    pad = harness.policy.images.rule.pad
    before = harness.policy.module.model.visual.patch_embed.proj.weight.detach().clone()
    play(harness, pad, "gone", {})
    harness.trainer.run_once()
    verdict = harness.stream.heads["gone-0"].verdict
    assert (verdict.code, "is not stored" in verdict.detail) == ("invalid", True), verdict
    assert harness.trainer.step == 0
    play(harness, pad, "here", STORE)
    assert harness.trainer.run_once()
    harness.save()
    assert harness.stream.heads["here-0"].verdict.code == "trained"
    assert not torch.equal(before, harness.policy.module.model.visual.patch_embed.proj.weight)


def test_a_text_model_does_not_train_sessions_with_images(harness: Any) -> None:
    play(harness, 30, "g", STORE)
    harness.trainer.run_once()
    verdict = harness.stream.heads["g-0"].verdict
    assert (verdict.code, "does not train" in verdict.detail) == ("invalid", True), verdict
