"""A published policy: one numbered set of weights, and a manifest with the digests of its files.

trainer ── writes ──▶ {location}/model.safetensors, config.json, tokenizer …, manifest.json, STABLE
rollout server ── verifies ──▶ names, shapes, dtypes, sizes and SHA-256 against the manifest

A LoRA adapter may be a policy of its own: calls name it as `policy:name@version`. A policy is in a directory,
or in an S3-compatible store: in a bucket, below a name that its objects begin with.

A delta is a file that holds the changes of one weights file against the tensors of an earlier version, its
*base*.

8 bytes: length of the header (little-endian) · DeltaHeader, JSON · one payload for each tensor, in order

A change is the bitwise XOR of a value's bits in both versions, taken as whole numbers. `same` has no payload,
`dense` is the tensor's bytes. `sparse` and `xor` are frames of zstandard: `sparse` has the distance of each
changed value to the one before it (uint32), then the changes; `xor` has the changes of all values, the lowest
byte of each value first, then all second bytes, and so on.

A TrainedStep in Redis says from which version a step of the trainer began, and which one it made:

version 7 ◀─ base ─ TrainedStep 12 ─▶ version 8 ◀─ base ─ TrainedStep 13 ─▶ version 9
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    """A file of changes, from which a server makes the file `target` of the version."""

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


class PublishedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as the gateways store it. A name and a version name one content for ever."""

    name: str
    version: int
    location: str
    manifest_sha256: str | None = None
    created_at: float
    passing: bool = False
    """It makes room for others, and comes back when it is called."""

    @property
    def field(self) -> str:
        """Its field in Redis."""
        return f"{self.name}@{self.version}"


DELTA_SUFFIX = ".delta"
Encoding = Literal["same", "dense", "sparse", "xor"]


class TensorChange(msgspec.Struct, frozen=True):
    """How one tensor is encoded, and how many bytes its payload has."""

    name: str
    encoding: Encoding
    size: int


class DeltaHeader(msgspec.Struct, frozen=True):
    """`header` is the text of the weights file's own header, without its length. The changes are in the order
    of the tensors' bytes in that file."""

    header: str
    changes: list[TensorChange]


URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<path>(/[A-Za-z0-9._~@=+-]+)*)/?")
"""Other names of buckets and keys exist; these need no escapes anywhere."""


@dataclass(frozen=True)
class ObjectPrefix:
    """s3://bucket/path: each file has its name below that, as in a directory."""

    bucket: str
    path: str
    """Without a slash at its ends; empty for the whole bucket."""

    @classmethod
    def parse(cls, url: str) -> "ObjectPrefix":
        """Raises ValueError for anything but s3://bucket/path. The error does not repeat the URL."""
        found = URL.fullmatch(url)
        if found is None:
            raise ValueError("is not a plain URL s3://bucket/path")
        path = found["path"].strip("/")
        if {".", ".."} & set(path.split("/")):
            raise ValueError("has a segment . or ..")
        return cls(found["bucket"], path)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.path}".rstrip("/")

    def below(self, name: str) -> "ObjectPrefix":
        """The object or the prefix with this name in this one."""
        return ObjectPrefix(self.bucket, f"{self.path}/{name}".lstrip("/"))

    def is_under(self, other: "ObjectPrefix") -> bool:
        """Whether it is `other`, or lies in it."""
        return self.bucket == other.bucket and f"{self.path}/".startswith(f"{other.path}/".lstrip("/"))


class TrainedStep(msgspec.Struct, frozen=True):
    """A durable step. The counts are those of the step, also after its sessions were deleted or forgotten."""

    step: int
    version: int
    """The version that the step made."""
    base: int
    """The version of the weights before the step."""
    turns: int
    sessions: int
    tokens: int
    """The trained tokens."""


def chain(version: int, made: Mapping[int, TrainedStep]) -> list[TrainedStep]:
    """The steps that led to `version`, the last one first, as far as `made` has them. `made` has steps by the
    version that they made. The chain ends at a version that no step made, such as one that was restored."""
    steps: list[TrainedStep] = []
    while (step := made.get(version)) is not None and step.base < version:
        steps.append(step)
        version = step.base
    return steps
