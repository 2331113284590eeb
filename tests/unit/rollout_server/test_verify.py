"""A set of weights is verified before an engine loads it, and each fault is named."""

import contextlib
import hashlib
import json
import math
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_queue.contract.published_policy import DELTA_SUFFIX, FileSpec
from rollout_queue.protocol.rollout_server_messages import Joining, SentTensor
from rollout_server.collective import TensorReceiver
from rollout_server.weights.locations import LocalPolicy
from rollout_server.weights.verify import ExpectedModel, read_manifest, verify_directory
from rollout_server.weights.weight_files import (
    BrokenWeights,
    CheckEnded,
    FileCheck,
    check_path,
    read_header,
    weights_differ,
)
from tests.support.rollout_server.weights import (
    SHAPES,
    WEIGHTS,
    Tensors,
    float32_tensors,
    publish,
    write_model,
    write_safetensors,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def pushed(tmp_path: Path) -> Path:
    return write_model(tmp_path / "pushed", float32_tensors(2.0))


def verify(model: Path, pushed: Path) -> None:
    manifest = read_manifest((pushed / "manifest.json").read_bytes(), 3)
    verify_directory(pushed, manifest, ExpectedModel.of(model))


def rewritten(pushed: Path, tensors: Tensors) -> Path:
    write_safetensors(pushed / WEIGHTS, tensors)
    publish(pushed, 3)
    return pushed


def test_a_truncated_file_is_refused(model: Path, pushed: Path) -> None:
    publish(pushed, 3)
    raw = (pushed / WEIGHTS).read_bytes()
    (pushed / WEIGHTS).write_bytes(raw[:-4])
    with pytest.raises(BrokenWeights, match=r"model.safetensors: has \d+ bytes"):
        verify(model, pushed)


@pytest.mark.parametrize("kept_bytes", [0, 5, 8, 30, -4])
def test_a_truncated_file_is_refused_by_its_own_header(pushed: Path, kept_bytes: int) -> None:
    raw = (pushed / WEIGHTS).read_bytes()
    (pushed / WEIGHTS).write_bytes(raw[:kept_bytes])
    with pytest.raises(BrokenWeights, match="truncated"):
        read_header(pushed / WEIGHTS)


def test_a_flipped_bit_is_refused(model: Path, pushed: Path) -> None:
    publish(pushed, 3)
    raw = bytearray((pushed / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (pushed / WEIGHTS).write_bytes(raw)
    with pytest.raises(BrokenWeights, match="SHA-256"):
        verify(model, pushed)


def test_a_missing_file_is_refused(model: Path, pushed: Path) -> None:
    publish(pushed, 3)
    (pushed / "tokenizer.json").unlink()
    with pytest.raises(BrokenWeights, match=r"tokenizer.json: is missing"):
        verify(model, pushed)


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"model.norm.weight": None}, r"'model.norm.weight': is missing"),
        ({"lm_head.weight": None}, r"'lm_head.weight': is missing"),
        ({"model.extra": [1]}, r"'model.extra': is not in the engine's model"),
        ({"lm_head.weight": [2, 4]}, r"'lm_head.weight': has shape \[2, 4\]"),
    ],
    ids=["missing", "an untied head is missing", "extra", "another shape"],
)
def test_tensors_that_are_not_the_models_are_refused(
    model: Path, pushed: Path, shapes: dict[str, list[int] | None], why: str
) -> None:
    (model / "config.json").write_text('{"tie_word_embeddings": false}')
    there = {name: shape for name, shape in (SHAPES | shapes).items() if shape is not None}
    with pytest.raises(BrokenWeights, match=why):
        verify(model, rewritten(pushed, float32_tensors(shapes=there)))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "NONSENSE"])
def test_an_unsupported_dtype_is_refused(pushed: Path, dtype: str) -> None:
    tensors = float32_tensors() | {"model.norm.weight": (dtype, [2], bytes(8))}
    write_safetensors(pushed / WEIGHTS, tensors)
    with pytest.raises(BrokenWeights, match=f"'model.norm.weight': dtype {dtype}"):
        read_header(pushed / WEIGHTS)


@pytest.mark.parametrize("dtype", ["I32", "F64"])
def test_a_dtype_that_engines_do_not_compute_with_is_refused_except_where_the_model_has_it(
    model: Path, pushed: Path, dtype: str
) -> None:
    tensors = float32_tensors() | {"model.norm.weight": (dtype, [2], bytes(8 if dtype == "I32" else 16))}
    rewritten(pushed, tensors)
    with pytest.raises(BrokenWeights, match=f"'model.norm.weight': dtype {dtype}"):
        verify(model, pushed)
    write_safetensors(model / WEIGHTS, tensors)
    verify(model, pushed)


def test_a_dtype_other_than_the_manifests_is_refused(model: Path, pushed: Path) -> None:
    tensors = float32_tensors() | {"model.norm.weight": ("BF16", [2], bytes(4))}
    publish(rewritten(pushed, tensors), 3)
    manifest = (pushed / "manifest.json").read_text()
    (pushed / "manifest.json").write_text(manifest.replace('"BF16"', '"F16"'))
    with pytest.raises(BrokenWeights, match=r"BF16\[2\], the manifest says F16\[2\]"):
        verify(model, pushed)


@pytest.mark.parametrize(
    ("dtype", "raw"),
    [
        ("F32", struct.pack("<2f", 1.0, float("nan"))),
        ("F32", struct.pack("<2f", float("-inf"), 1.0)),
        ("F16", struct.pack("<2e", 1.0, float("inf"))),
        ("F16", struct.pack("<2e", float("nan"), 1.0)),
        ("BF16", struct.pack("<2H", 0x3F80, 0x7F80)),
        ("BF16", struct.pack("<2H", 0xFFC0, 0x3F80)),
    ],
)
def test_a_value_that_is_not_finite_is_refused(model: Path, pushed: Path, dtype: str, raw: bytes) -> None:
    tensors = float32_tensors() | {"model.norm.weight": (dtype, [2], raw)}
    with pytest.raises(BrokenWeights, match=r"'model.norm.weight': holds infinity or NaN"):
        verify(model, rewritten(pushed, tensors))


@pytest.mark.parametrize(
    ("dtype", "raw"),
    [("F32", b"\xff\xff\x7f\x7f" * 2), ("BF16", b"\x7f\x7f\x7f\xff"), ("BF16", bytes(4))],
)
def test_the_largest_finite_values_and_another_float_type_than_the_engines_are_fine(
    model: Path, pushed: Path, dtype: str, raw: bytes
) -> None:
    tensors = float32_tensors() | {"model.norm.weight": (dtype, [2], raw)}
    verify(model, rewritten(pushed, tensors))


def test_a_tied_head_may_be_there_or_not(tmp_path: Path) -> None:
    without = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    tied = write_model(tmp_path / "tied", float32_tensors(shapes=without), tie_word_embeddings=True)
    pushed = write_model(tmp_path / "pushed", float32_tensors(), tie_word_embeddings=True)
    verify(tied, rewritten(pushed, float32_tensors()))
    verify(tied, rewritten(pushed, float32_tensors(shapes=without)))


def test_an_index_that_leaves_a_tensor_out_is_refused(model: Path, pushed: Path) -> None:
    weight_map = {name: WEIGHTS for name in SHAPES if name != "model.norm.weight"}
    (pushed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    publish(pushed, 3)
    with pytest.raises(BrokenWeights, match="index"):
        verify(model, pushed)


def test_a_config_of_another_model_is_refused(model: Path, pushed: Path) -> None:
    (model / "config.json").write_text('{"num_attention_heads": 2}')
    (pushed / "config.json").write_text('{"num_attention_heads": 4}')
    publish(pushed, 3)
    with pytest.raises(BrokenWeights, match=r"config.json: num_attention_heads is 4"):
        verify(model, pushed)


def _offsets(change: Callable[[dict[str, dict[str, object]]], object]) -> bytes:
    header: dict[str, dict[str, object]] = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "raw",
    [
        _offsets(lambda header: header["b"].update(data_offsets=[0, 4])),
        _offsets(lambda header: header.update(c={**header["a"]})),  # two tensors overlap
        _offsets(lambda header: header["b"].update(data_offsets=[8, 12])),  # past the end
        _offsets(lambda header: header["b"].update(data_offsets=[8, 4])),
        _offsets(lambda header: header["b"].update(data_offsets=[-4, 0])),
        _offsets(lambda header: header["b"].update(shape=[2])),
        _offsets(lambda header: header["b"].update(shape=[True])),
        _offsets(lambda header: header["b"].pop("dtype")),
        _offsets(lambda header: header.pop("b")),  # bytes that no tensor owns
        (2**62).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"[[]]",
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
        (60000).to_bytes(8, "little") + b"[" * 60000,
    ],
)
def test_a_header_that_contradicts_the_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / WEIGHTS).write_bytes(raw)
    with pytest.raises(BrokenWeights):
        read_header(tmp_path / WEIGHTS)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_with_the_readers_own_error(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.mktemp("raw") / WEIGHTS
    path.write_bytes(raw)
    with contextlib.suppress(BrokenWeights):
        read_header(path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", "a/b.json", "STABLE", "weights.bin", "x.py", ""]
)
def test_a_manifest_names_plain_files_only(name: str) -> None:
    files = [{"name": name, "size": 1, "sha256": "0"}, {"name": WEIGHTS, "size": 1, "sha256": "0"}]
    with pytest.raises(BrokenWeights, match="no policy may contain"):
        read_manifest(json.dumps({"version": 3, "step": 1, "files": files}).encode(), 3)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"version": 3, "step": 1, "files": []}',
        b'{"version": 4, "step": 1, "files": [{"name": "model.safetensors", "size": 1, "sha256": "0"}]}',
    ],
)
def test_an_unusable_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(BrokenWeights):
        read_manifest(text, 3)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([("x.json", WEIGHTS)], "no file of changes"),
        ([("../x.changes", WEIGHTS)], "no file of changes"),
        ([(f"x{DELTA_SUFFIX}", "other.safetensors")], "does not name"),
        ([(f"x{DELTA_SUFFIX}", "config.json")], "does not name"),
        ([(f"x{DELTA_SUFFIX}", WEIGHTS), (f"y{DELTA_SUFFIX}", WEIGHTS)], "twice"),
        ([(f"taken{DELTA_SUFFIX}", WEIGHTS)], "no file of changes"),
    ],
)
def test_changes_that_fit_no_file_are_refused(changes: list[tuple[str, str]], why: str) -> None:
    named = [WEIGHTS, "config.json", f"taken{DELTA_SUFFIX}"]
    delta = {
        "base_version": 2,
        "base_manifest_sha256": "0",
        "chain": 1,
        "files": [{"name": name, "size": 1, "sha256": "0", "target": target} for name, target in changes],
    }
    files = [{"name": name, "size": 1, "sha256": "0"} for name in named]
    text = json.dumps({"version": 3, "step": 1, "files": files, "delta": delta})
    with pytest.raises(BrokenWeights, match=why):
        read_manifest(text.encode(), 3)


def test_weights_differ_by_value_not_by_layout(model: Path, pushed: Path) -> None:
    assert weights_differ(model, pushed, float32_engine=True)
    write_safetensors(pushed / WEIGHTS, dict(reversed(float32_tensors(1.0).items())))
    assert not weights_differ(model, pushed, float32_engine=True)


def test_an_engine_that_rounds_may_hold_equal_weights_for_both(model: Path, pushed: Path) -> None:
    assert not weights_differ(model, pushed, float32_engine=False)


@pytest.mark.parametrize(
    ("stored", "sent", "float32_engine", "differs"),
    [("F32", "float32", True, True), ("F32", "float32", False, False), ("BF16", "bfloat16", False, True)],
)
def test_an_engine_that_rounds_may_hold_equal_weights_for_tensors_that_it_receives(
    model: Path, stored: str, sent: str, float32_engine: bool, differs: bool
) -> None:
    write_safetensors(model / WEIGHTS, {"w": (stored, [], bytes(4 if stored == "F32" else 2))})
    tensor = SentTensor(name="w", dtype=sent, shape=(), fingerprint=1)
    joining = Joining(
        master_address="", master_port=1, group="g", backend="gloo", world_size=2, buckets=((tensor,),)
    )
    nobody = cast(Any, None)
    receiver = TensorReceiver(nobody, nobody, "", None, timeout_s=1.0, rest_s=1.0)
    assert receiver.differs(joining, LocalPolicy(1, model), float32_engine=float32_engine) == differs


# One pass over the bytes, in pieces of any size


def file_of(values: list[float], dtype: str) -> tuple[bytes, FileSpec]:
    """A file with two tensors of these values, and what its manifest says."""
    pattern = {"F32": "<f", "F16": "<e"}[dtype]
    raw = b"".join(struct.pack(pattern, value) for value in values)
    half = len(values) // 2 * struct.calcsize(pattern)
    ones, twos = len(values) // 2, len(values) - len(values) // 2
    tensors = {"one": (dtype, [ones], raw[:half]), "two": (dtype, [twos], raw[half:])}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / WEIGHTS
        write_safetensors(path, tensors)
        content = path.read_bytes()
    return content, FileSpec(WEIGHTS, len(content), hashlib.sha256(content).hexdigest())


HALVES = st.integers(0, 2**16 - 1).map(lambda bits: float(struct.unpack("<e", struct.pack("<H", bits))[0]))
"""Numbers of 16 bits. `floats(width=16)` makes wider ones, and throws most of them away."""


@given(
    st.lists(HALVES, min_size=2, max_size=12),
    st.sampled_from(["F32", "F16"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_pieces_of_any_size_give_the_same_result(values: list[float], dtype: str, sizes: list[int]) -> None:
    content, spec = file_of(values, dtype)
    check, position, turn = FileCheck(spec), 0, 0
    while position < len(content):
        piece = content[position : position + sizes[turn % len(sizes)]]
        check.feed(piece)
        position, turn = position + len(piece), turn + 1
    checked = check.finish()
    assert {name: tensor.shape for name, tensor in checked.tensors.items()} == {
        "one": (len(values) // 2,),
        "two": (len(values) - len(values) // 2,),
    }
    parts = {"one": values[: len(values) // 2], "two": values[len(values) // 2 :]}
    infinite = [name for name, part in parts.items() if not all(map(math.isfinite, part))]
    assert checked.infinite == (infinite[0] if infinite else None)


def test_a_check_ends_when_nobody_waits_for_it(pushed: Path) -> None:
    content = (pushed / WEIGHTS).read_bytes()
    spec = FileSpec(WEIGHTS, len(content), hashlib.sha256(content).hexdigest())
    assert check_path(pushed / WEIGHTS, spec).infinite is None
    with pytest.raises(CheckEnded):
        check_path(pushed / WEIGHTS, spec, lambda: True)
