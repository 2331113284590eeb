"""Small sets of weights for tests, written byte by byte, so that a test can damage any byte."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from rollout_queue.contract.published_policy import (
    MANIFEST,
    STABLE,
    FileSpec,
    Manifest,
    TensorSpec,
    sha256_of,
)
from rollout_server.weights.weight_files import read_header
from rollout_server.weights.weights_store import manifest_digest

Tensors = Mapping[str, tuple[str, list[int], bytes]]
"""By name: a tensor's dtype, shape and raw bytes."""
WEIGHTS = "model.safetensors"
SHAPES = {"model.embed_tokens.weight": [4, 2], "model.norm.weight": [2], "lm_head.weight": [4, 2]}


def float32_tensors(
    fill: float = 1.0, shapes: Mapping[str, list[int]] = SHAPES
) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        name: ("F32", shape, np.full(shape, fill, dtype="<f4").tobytes()) for name, shape in shapes.items()
    }


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_model(directory: Path, tensors: Tensors | None = None, **config: object) -> Path:
    directory.mkdir(parents=True)
    write_safetensors(directory / WEIGHTS, tensors or float32_tensors())
    (directory / "config.json").write_text(json.dumps({"architectures": ["Tiny"], **config}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def publish(directory: Path, version: int, *, collective: bool = False) -> str:
    """Make a model directory a published policy; return the SHA-256 of its manifest."""
    files = []
    for path in sorted(directory.iterdir()):
        if path.name in (MANIFEST, STABLE):
            continue
        tensors = read_header(path).values() if path.suffix == ".safetensors" else []
        specs = [TensorSpec(tensor.name, list(tensor.shape), tensor.dtype) for tensor in tensors]
        files.append(FileSpec(path.name, path.stat().st_size, sha256_of(path), specs))
    text = msgspec.json.encode(Manifest(version=version, step=version, files=files, collective=collective))
    (directory / MANIFEST).write_bytes(text)
    (directory / STABLE).touch()
    return manifest_digest(text)


def published_copy(model: Path, directory: Path, version: int) -> Path:
    shutil.copytree(model, directory)
    publish(directory, version)
    return directory
