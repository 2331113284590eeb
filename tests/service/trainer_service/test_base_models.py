"""Models that others made: the trainer's first version is served whatever lies in their directories, or the
start of trainer and rollout server is refused in one sentence."""

import asyncio
import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rollout_queue.contract.published_policy import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MANIFEST,
    DeltaHeader,
    Manifest,
)
from rollout_queue.protocol.rollout_server_messages import JoinBody
from rollout_server.collective import TORCH_NAMES
from rollout_server.weights.fetch import apply_delta
from rollout_server.weights.verify import ExpectedModel
from rollout_server.weights.weight_files import BrokenWeights, fingerprint, tensors_of
from tests.support.rollout_server.harness import make_harness as make_server
from tests.support.trainer_service.base_models import (
    INDEX,
    WEIGHTS,
    Change,
    adding,
    configured,
    copied,
    sharded,
    with_file,
    with_weights,
    without,
)
from tests.support.trainer_service.harness import MakeHarness
from tests.support.trainer_service.receiving import receive
from tests.support.waiting import PATIENCE_S
from trainer_service.model.huggingface import copy_small_files, load_model
from trainer_service.publishing.tensor_sender import TensorSender
from trainer_service.settings import CollectiveSettings
from trainer_service.storage.policy_store import PolicyStore

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
MTP = {"mtp.fc.weight": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)}
OTHERS = {
    **MTP,
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8, dtype=torch.float64),
    "model.position_ids": torch.arange(7),
    "model.causal_mask": torch.tensor([True, False, True]),
    "model.bias": torch.full((2, 2), -torch.inf),
    "model.steps": torch.tensor(3, dtype=torch.int32),
    "model.empty": torch.empty(0),
}
ADAPTER = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 32)}

DIGEST = "0" * 64
WISH = JoinBody(manifest_sha256=DIGEST, ranks=1, device="cpu", wait_s=20.0)

SHAPES: dict[str, list[Change]] = {
    "tensors that nobody trains": [adding(OTHERS)],
    "a consolidated file": [with_weights("consolidated.safetensors")],
    "shards and consolidated shards": [sharded, with_weights("consolidated-00001-of-00001.safetensors")],
    "shards beside an older file": [partial(sharded, keeps=True)],
    "shards without an index": [partial(sharded, index=False), with_weights("other.safetensors")],
    "an index without metadata": [sharded, lambda path: reindexed(path, "metadata")],
    "an adapter beside them": [
        with_weights(ADAPTER_WEIGHTS, ADAPTER),
        with_file(ADAPTER_CONFIG, b'{"peft_type": "LORA", "base_model_name_or_path": "/nowhere", "r": 2}'),
    ],
    "a version, and a directory of originals": [
        with_file("manifest.json", b"{}"),
        with_file("STABLE", b""),
        with_file("original/consolidated.00.pth"),
    ],
}


def reindexed(directory: Path, without: str, **others: object) -> None:
    index = json.loads((directory / INDEX).read_text()) | others
    (directory / INDEX).write_text(json.dumps({key: value for key, value in index.items() if key != without}))


def made(model: Path, tmp_path: Path, *changes: Change) -> Path:
    return copied(model, tmp_path / "model", *changes)


def names_in(directory: Path) -> set[str]:
    """The tensors of the files that an engine loads."""
    index = directory / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {WEIGHTS}
    found: set[str] = set()
    for name in files:
        with safe_open(directory / name, "pt") as file:
            found |= set(file.keys())
    return found


def served(tmp_path: Path, *versions: Path) -> tuple[Path, dict[str, Any]]:
    """Start a rollout server with the model in `tmp_path`, and have it load these versions. Returns the
    directory that its engine has loaded, and its status."""

    async def running() -> tuple[Path, dict[str, Any]]:
        async with make_server(tmp_path, locations=[tmp_path.as_uri()]).started() as server:
            for number, version in enumerate(versions, 1):
                reply = await server.reload(number, version)
                assert reply.status_code == 200, reply.text
            status = await server.status()
            assert status["version"] == len(versions)
            return server.server.engine.policy.directory, status

    return asyncio.run(running())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lora", [False, True])
def test_the_first_version_of_a_model_is_served_whatever_else_its_directory_has(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path, shape: str, lora: bool
) -> None:
    model = made(model_path, tmp_path, *SHAPES[shape])
    harness = make_harness(model_path=model, **({"lora": {"rank": 2}} if lora else {})).start()
    harness.step("g")
    version = harness.store.path_of(1)
    assert names_in(version) == (
        names_in(model) if (model / INDEX).exists() else names_in(model_path) | extra(shape)
    )
    served(tmp_path, version)


def extra(shape: str) -> set[str]:
    return set(OTHERS) if shape == "tensors that nobody trains" else set()


def test_what_nobody_trains_comes_as_the_base_has_it_and_takes_no_memory(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path
) -> None:
    model = made(model_path, tmp_path, adding(OTHERS))
    harness = make_harness(model_path=model, checkpoint_hf=True).start()
    snapshots = [harness.policy.snapshot() for _ in range(2)]
    harness.step("g")
    (checkpoint,) = harness.settings.checkpoint_dir.glob("*-step-*1/model")
    for directory in (harness.store.path_of(1), checkpoint):
        written = load_file(directory / WEIGHTS)
        assert written.keys() == load_file(model / WEIGHTS).keys()
        for name, value in OTHERS.items():
            assert (written[name].dtype, written[name].shape) == (value.dtype, value.shape)
            assert torch.equal(written[name], value)
        assert not torch.equal(written[NORM], load_file(model / WEIGHTS)[NORM])
    first, second = ({each.name: each.value for each in taken.tensors} for taken in snapshots)
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in OTHERS)


def test_no_changes_of_what_nobody_trains_travel_and_engines_that_receive_tensors_get_them_too(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path
) -> None:
    model = made(model_path, tmp_path, adding(OTHERS))
    harness = make_harness(model_path=model).start()
    store = PolicyStore(tmp_path / "deltas", model, 4, anchor_every=4)
    for number in (1, 2):
        harness.step(f"g{number}")
        store.write(number, number, (snapshot := harness.policy.snapshot()).write)
    base, version = store.path_of(1), store.path_of(2)
    manifest = msgspec.json.decode((version / MANIFEST).read_bytes(), type=Manifest)
    assert manifest.delta is not None
    (changes,), specs = manifest.delta.files, {spec.name: spec for spec in manifest.files}
    apply_delta(version / changes.name, tensors_of(base), specs[WEIGHTS], tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == (version / WEIGHTS).read_bytes()
    size = int.from_bytes((version / changes.name).read_bytes()[:8], "little")
    said = msgspec.json.decode((version / changes.name).read_bytes()[8 : 8 + size], type=DeltaHeader)
    assert {each.name for each in said.changes if each.encoding == "same"} >= OTHERS.keys() - {"model.empty"}
    with closing(TensorSender(CollectiveSettings(), torch.device("cpu"))) as sender:
        sender.offer(2, DIGEST, snapshot.tensors)
        joining = sender.join(2, WISH).result(PATIENCE_S)
        received = receive(joining)
        sender.end(joining.group)
    files = tensors_of(version)
    assert received.keys() == files.keys()
    for sent in (tensor for bucket in joining.buckets for tensor in bucket):
        path, stored = files[sent.name]
        assert (TORCH_NAMES[stored.dtype], stored.shape) == (sent.dtype, sent.shape)
        assert fingerprint(path, stored) == sent.fingerprint
    assert all(torch.equal(received[name], value) for name, value in OTHERS.items())


def test_a_version_of_adapters_has_the_frozen_weights_as_the_base_has_them(
    make_harness: MakeHarness, model_path: Path
) -> None:
    """bfloat16 would round them."""
    harness = make_harness(lora={"rank": 2}, dtype="bfloat16", zero_stage=1).start()
    harness.step("g")
    before, after = (load_file(path / WEIGHTS) for path in (model_path, harness.store.path_of(1)))
    assert torch.equal(before[EMBEDDING], after[EMBEDDING])
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("_proj" in name for name in changed)


def test_the_weights_that_the_index_names_are_trained_and_not_an_older_file(
    model_path: Path, tmp_path: Path
) -> None:
    model = made(model_path, tmp_path, partial(sharded, keeps=True))
    loaded = load_model(model, torch.float32).state_dict()
    assert torch.equal(loaded[NORM], load_file(model_path / WEIGHTS)[NORM])


def test_the_engine_starts_with_the_weights_alone(model_path: Path, tmp_path: Path) -> None:
    """SGLang would read every safetensors file if there is no index."""
    made(model_path, tmp_path, *SHAPES["an adapter beside them"])
    directory, _ = served(tmp_path)
    assert [path.name for path in directory.glob("*.safetensors")] == [WEIGHTS]
    assert (directory / "config.json").is_file()


# The output head


TIED = {"true": True, "false": False, "absent": None}
FILES: dict[str, list[Change]] = {
    "no head": [],
    "equal": [lambda path: adding({HEAD: load_file(path / WEIGHTS)[EMBEDDING].clone()})(path)],
    "another": [lambda path: adding({HEAD: load_file(path / WEIGHTS)[EMBEDDING] + 1})(path)],
    "no embedding": [
        lambda path: adding({HEAD: load_file(path / WEIGHTS)[EMBEDDING].clone()})(path),
        without(EMBEDDING),
    ],
}
GEMMA = {"true no head", "true equal", "false equal", "false another", "absent no head", "absent equal"}
QWEN = {"true no head", "true equal", "false equal", "false another", "absent equal", "absent another"}


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A type of model that is tied unless config.json says that it is not."""
    from transformers import GemmaConfig, GemmaForCausalLM

    directory: Path = tmp_path_factory.mktemp("gemma")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
    torch.manual_seed(3)
    GemmaForCausalLM(GemmaConfig(**shape, **heads)).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("kind", ["qwen", "gemma"])
def test_a_head_that_is_tied_or_not_is_served_or_refused_at_the_start_by_both(
    make_harness: MakeHarness, model_path: Path, gemma: Path, tmp_path: Path, kind: str, tied: str, files: str
) -> None:
    base, works = (gemma, GEMMA) if kind == "gemma" else (model_path, QWEN)
    model = made(base, tmp_path, *FILES[files], configured(tie_word_embeddings=TIED[tied]))
    if f"{tied} {files}" in works:
        harness = make_harness(model_path=model).start()
        harness.step("g")
        served(tmp_path, harness.store.path_of(1))
        return
    with pytest.raises(SystemExit) as ended:
        make_harness(model_path=model)
    for said in (str(ended.value), refusal_of_server(model)):
        assert HEAD in said or EMBEDDING in said
        assert "\n" not in said


def refusal_of_server(model: Path) -> str:
    """What a rollout server says of a model that it does not serve."""
    with pytest.raises(BrokenWeights) as refused:
        ExpectedModel.of(model)
    return str(refused.value)


# What cannot be served is refused at the start


def cut(directory: Path) -> None:
    path = directory / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def misnamed(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.lost"] = "model-00001-of-00002.safetensors"
    (directory / INDEX).write_text(json.dumps(index))


def outside(directory: Path) -> None:
    text = (directory / INDEX).read_text().replace("model-00002", "../model-00002")
    (directory / INDEX).write_text(text)


def again(directory: Path) -> None:
    with_weights("model-extra.safetensors", {NORM: torch.ones(32)})(directory)


BOTH = True
QWEIGHT = "model.layers.0.mlp.up_proj.qweight"
FAULTS: dict[str, tuple[list[Change], str, bool]] = {
    "a shard is missing": (
        [sharded, lambda path: (path / "model-00002-of-00002.safetensors").unlink()],
        "model-00002-of-00002.safetensors: is missing",
        BOTH,
    ),
    "a shard is too short": ([sharded, cut], "model-00002-of-00002.safetensors: is truncated", BOTH),
    "the index names a tensor that is nowhere": ([sharded, misnamed], "tensor 'model.lost'", BOTH),
    "the index leads elsewhere": ([sharded, outside], "../model-00002", BOTH),
    "the index names nothing": (
        [sharded, lambda path: reindexed(path, "", weight_map={})],
        f"{INDEX}: names no tensor",
        BOTH,
    ),
    "a shard is missing, and there is no index": (
        [partial(sharded, index=False), lambda path: (path / "model-00001-of-00002.safetensors").unlink()],
        "model-00001-of-00002.safetensors: is missing",
        BOTH,
    ),
    "a pointer of Git LFS": (
        [with_file(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n")],
        f"{WEIGHTS}: is a pointer of Git LFS",
        BOTH,
    ),
    "another format": (
        [lambda path: (path / WEIGHTS).rename(path / "pytorch_model.bin")],
        "only pytorch_model.bin",
        BOTH,
    ),
    "the index is no JSON": ([with_file(INDEX, b"{")], INDEX, BOTH),
    "a tensor twice": ([partial(sharded, index=False), again], f"'{NORM}': is also in", BOTH),
    "no weights": ([lambda path: (path / WEIGHTS).unlink()], "no .safetensors file", BOTH),
    "no config": ([lambda path: (path / "config.json").unlink()], "config.json: cannot be read", BOTH),
    "quantized": (
        [adding({QWEIGHT: torch.ones(2, dtype=torch.int32)}), configured(quantization_config={"bits": 4})],
        QWEIGHT,
        BOTH,
    ),
    "quantized, its text part says": (
        [
            adding({QWEIGHT: torch.ones(2, dtype=torch.int32)}),
            configured(text_config={"quantization_config": {"bits": 4}}),
        ],
        QWEIGHT,
        BOTH,
    ),
    **{
        f"{method} is said, and nothing is quantized": (
            [configured(quantization_config={"quant_method": method})],
            "config.json: has quantization_config",
            BOTH,
        )
        for method in ("bitsandbytes", "gptq", "fp8", "mxfp4")
    },
    "a weight is missing": ([without(NORM)], f"no tensor {NORM}", not BOTH),
    "another shape": ([adding({NORM: torch.ones(7)})], f"'{NORM}': has shape [7], the model", not BOTH),
    "whole numbers": ([adding({NORM: torch.ones(32, dtype=torch.int64)})], f"'{NORM}': is I64", not BOTH),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_could_not_be_pushed_is_refused_in_one_sentence_before_it_is_loaded(
    make_harness: MakeHarness,
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    changes, why, both = FAULTS[fault]
    model = made(model_path, tmp_path, *changes)
    monkeypatch.setattr("trainer_service.model.deepspeed_policy.load_base", None)
    with pytest.raises(SystemExit) as ended:
        make_harness(model_path=model)
    assert str(ended.value).startswith(f"trainer.model_path: {model} cannot be trained: ")
    for said in [str(ended.value), *([refusal_of_server(model)] if both else [])]:
        assert why in said
        assert "\n" not in said


LOADED: dict[str, tuple[list[Change], str]] = {
    "an unknown type": ([configured(model_type="of-next-year")], "model type `of-next-year`"),
    "no type": ([configured(model_type=None)], "Should have a `model_type` key"),
    "a type that reads images": ([configured(model_type="llava")], "Unrecognized configuration class"),
    "code beside it": (
        [
            configured(model_type="own", auto_map={"AutoConfig": "own.Config"}),
            with_file("own.py", b"raise KeyboardInterrupt"),
        ],
        "contains custom code",
    ),
}


@pytest.mark.parametrize("fault", LOADED)
def test_a_model_that_transformers_does_not_load_is_refused_in_one_sentence(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    changes, why = LOADED[fault]
    model = made(model_path, tmp_path, *changes)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is there to answer"))
    with pytest.raises(SystemExit) as ended:
        make_harness(model_path=model)
    assert str(ended.value).startswith(f"trainer.model_path: {model} cannot be loaded: ")
    assert why in str(ended.value)
    assert "\n" not in str(ended.value)


# The table


def test_both_tell_what_they_found_out_about_the_model(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes = [adding(MTP), with_weights("consolidated.safetensors"), with_file("model.gguf")]
    model = made(model_path, tmp_path, *changes)
    harness = make_harness(model_path=model).start()
    rows = {each["check"]: each for each in harness.door().get("/status").json()["model_checks"]}
    assert rows["trained weights"]["outcome"] == "differs"
    assert "unchanged, mtp.fc.weight" in rows["trained weights"]["detail"]
    assert "nobody reads consolidated.safetensors" in rows["weights"]["detail"]
    assert "model.gguf" in rows["other files"]["detail"]
    assert EMBEDDING in rows["output head"]["detail"]
    assert rows["tokenizer"]["outcome"] == "unknown", "its tokenizer.json is no tokenizer"
    told = {each["check"]: each for each in served(tmp_path)[1]["model_checks"]}
    for row in ("weights", "tensors", "output head"):
        assert told[row] == rows[row], "so that two models can be told apart"
    for line in ("trained weights: differs", "tensors: right", "other files: differs"):
        assert f"the model, checked at the start: {line}" in caplog.text


# The files beside the weights


KEPT = {
    *("config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json"),
    *("chat_template.jinja", "tokenizer.model", "tokenizer.model.v3", "merges.txt", "qwen.tiktoken"),
}
FOREIGN = {
    *("model.gguf", "model.h5", "model.msgpack", "model.ot", "model.onnx", "model.onnx_data", "model.tflite"),
    *(
        "model.nemo",
        "model.tar.gz",
        "model.bin",
        "model.pt",
        "model.npz",
        "model.py",
        "pytorch.bin.index.json",
    ),
    *(ADAPTER_CONFIG, "manifest.json", "STABLE", ".hidden.json"),
}


def test_a_version_has_what_a_model_needs_and_nothing_else(
    tmp_path: Path, model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes = [with_file(name, b"{}") for name in (*KEPT, *FOREIGN) if name != "config.json"]
    model = made(model_path, tmp_path, *changes, with_file("additional_chat_templates/rag.jinja"))
    with (model / "huge.json").open("wb") as file:
        file.truncate(65 * 2**20)
    target = tmp_path / "target"
    target.mkdir()
    copy_small_files(model, target)
    found = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert found == {*KEPT, "additional_chat_templates/rag.jinja"}
    (line,) = [each.getMessage() for each in caplog.records if "are in no version" in each.getMessage()]
    assert all(name in line for name in (*FOREIGN, "huge.json"))


def test_the_other_formats_of_a_model_travel_neither_with_versions_nor_into_the_engines_directory(
    make_harness: MakeHarness, model_path: Path, tmp_path: Path
) -> None:
    foreign = ("model.gguf", "model.onnx", "manifest.json")
    changes = [
        with_file(name, b"{}") for name in (*foreign, "modeling.py", "additional_chat_templates/a.jinja")
    ]
    model = made(model_path, tmp_path, *changes)
    harness = make_harness(model_path=model).start()
    harness.step("g")
    version = harness.store.path_of(1)
    loaded, _ = served(tmp_path, version)
    for directory in (version, loaded):
        names = {path.name for path in directory.iterdir()}
        assert {"config.json", "tokenizer.json", WEIGHTS} <= names
        assert not names & {"model.gguf", "model.onnx", "additional_chat_templates"}
    assert (loaded / "modeling.py").exists(), "the code of this machine's model"
    assert not (version / "modeling.py").exists()
