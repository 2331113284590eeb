"""A published policy: one numbered set of weights, and a manifest with the digests of its files.

trainer ── writes ──▶ {location}/model.safetensors, config.json, tokenizer …, manifest.json, STABLE
rollout server ── verifies ──▶ names, shapes, dtypes, sizes and SHA-256 against the manifest
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

MANIFEST = "manifest.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a version that is a LoRA adapter, in PEFT's layout. Its base is the model that the engines
start with."""
STABLE = "STABLE"
"""An empty file that is written last, so a directory without it is not a published policy."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a safetensors file; `dtype` is safetensors' name for it (F32, BF16, …)."""

    name: str
    shape: list[int]
    dtype: str


class FileSpec(msgspec.Struct, frozen=True):
    """One file of a policy; `size` in bytes, `sha256` in hex, tensors for safetensors files."""

    name: str
    size: int
    sha256: str
    tensors: list[TensorSpec] = []


class DeltaFile(msgspec.Struct, frozen=True):
    """A file of changes (`delta.py`), from which a server makes the file `target` of the version."""

    name: str
    size: int
    sha256: str
    target: str


class WeightDelta(msgspec.Struct, frozen=True):
    """The version's weights as changes against another version, for servers that have that one."""

    base_version: int
    base_manifest_sha256: str
    chain: int
    """How many versions in a row were published with changes; the first one counts 1."""
    files: list[DeltaFile]


class Manifest(msgspec.Struct, frozen=True):
    """The content of a policy directory. `step` is the optimizer step that made the weights. A version with a
    `delta` has all of its own files, too."""

    version: int
    step: int
    files: list[FileSpec]
    delta: WeightDelta | None = None
    collective: bool = False
    """The trainer sends the tensors to engines in a process group, as long as it has them in memory."""

    @property
    def is_adapter(self) -> bool:
        """Whether the version is a LoRA adapter, and not whole weights."""
        return is_adapter(self.files)


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A version as the gateway stores it. `location` is null for the version that the engines started
    with."""

    version: int
    location: str | None = None
    manifest_sha256: str | None = None
    step: int | None = None
    size_bytes: int | None = None
    """What its files take on the trainer's disk; None if the publisher did not say."""
    created_at: float
    state: Literal["published", "serving", "failed", "retired"] = "published"
    trace: str | msgspec.UnsetType = msgspec.UNSET
    """The span that published it, as W3C's traceparent; not there if it is not traced."""


def is_adapter(files: Iterable[FileSpec]) -> bool:
    """Whether the files are those of a LoRA adapter."""
    return any(file.name == ADAPTER_CONFIG for file in files)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
