"""The directory of published versions: each one complete, with a manifest of its files' digests.

weights ─▶ v00000012.tmp/ ─ sync ─ rename ─▶ v00000012/ (…, manifest.json, STABLE last)
new tensor, base tensor ─▶ same? ─▶ XOR ─▶ the smallest of dense, sparse and xor ─▶ v….safetensors.delta

Servers that have the earlier version fetch only the delta.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from rollout_queue.contract.published_policy import (
    DELTA_SUFFIX,
    MANIFEST,
    STABLE,
    DeltaFile,
    DeltaHeader,
    Encoding,
    FileSpec,
    Manifest,
    TensorChange,
    WeightDelta,
    is_adapter,
    sha256_of,
)
from rollout_queue.model_files import ITEM_BYTES
from trainer_service.model.huggingface import copy_small_files
from trainer_service.storage.durable_files import sync_directory, sync_tree, written

LEVEL = 1
"""zstandard's level: changes are mostly zeros, and higher levels gain little."""
SPARSE_SHARE, XOR_SHARE = 0.3, 0.8
"""The largest shares of changed values for which these encodings are tried."""
Raw = npt.NDArray[np.uint8]


class _Stored(NamedTuple):
    """One tensor of a file: its type and shape, and its bytes, mapped from the disk."""

    dtype: str
    shape: tuple[int, ...]
    raw: Raw


def write_delta(directory: Path, base: Path) -> list[DeltaFile]:
    """For each weights file in `directory`, write a file of its changes against the tensors in `base`.

    Raises OSError.
    """
    earlier = {name: each for path in sorted(base.glob("*.safetensors")) for name, each in _tensors(path)}
    return [_write(path, earlier) for path in sorted(directory.glob("*.safetensors"))]


def encode(new: Raw, old: Raw | None, item_bytes: int) -> tuple[Encoding, bytes]:
    """The smallest encoding of a tensor's bytes. `old` has as many bytes, or is None without a base."""
    if old is None:
        return "dense", new.tobytes()
    words = f"<u{item_bytes}"
    changes = new.view(words) ^ old.view(words)
    count = np.count_nonzero(changes)
    if not count:
        return "same", b""
    share, compressor = count / len(changes), zstandard.ZstdCompressor(level=LEVEL)
    tried: list[tuple[Encoding, bytes]] = []
    if share <= SPARSE_SHARE and len(changes) < 2**32:
        (changed,) = np.nonzero(changes)  # 8 bytes for each
        gaps = np.diff(changed, prepend=0).astype("<u4")
        tried.append(("sparse", compressor.compress(gaps.tobytes() + changes[changed].tobytes())))
    if share <= XOR_SHARE:
        planes = np.ascontiguousarray(changes.view(np.uint8).reshape(-1, item_bytes).T)
        tried.append(("xor", compressor.compress(planes.tobytes())))
    encoding, payload = min(tried, key=lambda each: len(each[1]), default=("dense", b""))
    if encoding == "dense" or len(payload) >= new.nbytes:
        return "dense", new.tobytes()
    return encoding, payload


def _write(path: Path, earlier: dict[str, _Stored]) -> DeltaFile:
    target = path.with_name(path.name + DELTA_SUFFIX)
    changes: list[TensorChange] = []
    payloads = target.with_name(f".{target.name}.payloads")
    with payloads.open("wb") as file:
        for name, stored in _tensors(path):
            base = earlier.get(name)
            fits = base is not None and (base.dtype, base.shape) == (stored.dtype, stored.shape)
            old = base.raw if base is not None and fits else None
            encoding, payload = encode(stored.raw, old, ITEM_BYTES[stored.dtype])
            file.write(payload)
            changes.append(TensorChange(name, encoding, len(payload)))
    header = msgspec.json.encode(DeltaHeader(_header(path).decode(), changes))
    digest, size = hashlib.sha256(), 0
    with target.open("wb") as file, payloads.open("rb") as parts:
        chunk = len(header).to_bytes(8, "little") + header
        while chunk:
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
            chunk = parts.read(2**24)
    payloads.unlink()
    return DeltaFile(target.name, size, digest.hexdigest(), path.name)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _tensors(path: Path) -> Iterator[tuple[str, _Stored]]:
    """The tensors of a safetensors file, in the order of their bytes."""
    text = _header(path)
    header: dict[str, Any] = json.loads(text)
    header.pop("__metadata__", None)
    content = np.memmap(path, np.uint8, "r", offset=8 + len(text)) if header else np.empty(0, np.uint8)
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        yield name, _Stored(entry["dtype"], tuple(entry["shape"]), content[begin:end])


WeightsWriter = Callable[[Path], Sequence[FileSpec]]
"""Writes files of weights into a directory, and returns what the manifest says of them. Raises OSError."""
VERSION_DIRECTORY = re.compile(r"v(\d{8,})")
ASIDE = ".tmp"
REMOVED = "removed-"
"""How the name of a version begins while it is removed."""


class PolicyStore:
    """Writes, lists and removes the published versions in one directory."""

    def __init__(
        self,
        directory: Path,
        model_path: Path,
        keep: int,
        anchor_every: int | None = None,
        *,
        collective: bool = False,
    ) -> None:
        """With `anchor_every`, versions also have their changes against the one before, except each
        `anchor_every`th. With `collective`, manifests say that the trainer sends the tensors."""
        self._anchor_every = anchor_every
        self._collective = collective
        self.directory = directory
        self._model_path = model_path
        self._keep = keep
        directory.mkdir(parents=True, exist_ok=True)

    def path_of(self, version: int) -> Path:
        return self.directory / f"v{version:08d}"

    def versions(self) -> list[int]:
        """Every complete version, ascending."""
        found = (
            VERSION_DIRECTORY.fullmatch(p.name) for p in self.directory.iterdir() if (p / STABLE).exists()
        )
        return sorted(int(match[1]) for match in found if match)

    def size_of(self, version: int) -> int:
        """How many bytes the files of a version take, its changes included; 0 if it was removed."""
        try:
            return sum(path.stat().st_size for path in self.path_of(version).iterdir())
        except FileNotFoundError:  # another thread removes the version
            return 0

    @property
    def size(self) -> int:
        """How many bytes all versions take."""
        return sum(self.size_of(version) for version in self.versions())

    @property
    def free(self) -> int:
        """How many bytes are free on the disk."""
        return shutil.disk_usage(self.directory).free

    def write(self, version: int, step: int, write_weights: WeightsWriter) -> Path:
        """Write a version. If it exists already, it is kept: a crashed process wrote the same weights.

        Raises DiskRefused if the disk refuses; no file of the version is left then.
        """
        final = self.path_of(version)
        if (final / STABLE).exists():
            return final
        self._sweep(final)
        with written(f"version {version}", lambda: self._sweep(final)):
            self._write(final, version, step, write_weights)
        return final

    def _write(self, final: Path, version: int, step: int, write_weights: WeightsWriter) -> None:
        aside = final.with_name(f"{final.name}{ASIDE}")
        aside.mkdir()
        files = list(write_weights(aside))
        if not is_adapter(files):  # an engine takes the small files of an adapter from its base
            written = {file.name for file in files}
            copy_small_files(self._model_path, aside, flat=True)
            small = (each for each in sorted(aside.iterdir()) if each.name not in written)
            files += [FileSpec(each.name, each.stat().st_size, sha256_of(each)) for each in small]
        manifest = Manifest(
            version=version,
            step=step,
            files=files,
            delta=None
            if (every := self._anchor_every) is None
            else self._delta(version, aside, files, every),
            collective=self._collective,
        )
        (aside / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        sync_tree(aside)
        aside.rename(final)
        (final / STABLE).touch()
        sync_tree(final)
        sync_directory(self.directory)

    def _delta(
        self, version: int, aside: Path, files: Sequence[FileSpec], anchor_every: int
    ) -> WeightDelta | None:
        """Write the changes against the version before, if there is one and no anchor is due."""
        earlier = [each for each in self.versions() if each < version]
        if not earlier:
            return None
        base = self.path_of(earlier[-1])
        text = (base / MANIFEST).read_bytes()
        before = msgspec.json.decode(text, type=Manifest)
        chain = 1 + (before.delta.chain if before.delta is not None else 0)
        if chain >= anchor_every or is_adapter(files) or before.is_adapter:
            return None
        return WeightDelta(before.version, hashlib.sha256(text).hexdigest(), chain, write_delta(aside, base))

    def outdated(self, best: int | None = None) -> list[int]:
        """The versions that may be removed: all but the last `keep` versions, and `best`."""
        return [version for version in self.versions()[: -self._keep] if version != best]

    def remove(self, version: int) -> None:
        """Remove the files of a version. Files that cannot be removed now are when the next version is
        written. Raises OSError if the version stays."""
        path = self.path_of(version)
        aside = path.with_name(f"{REMOVED}{path.name}")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def discard(self, version: int) -> None:
        """Remove the files of a version, if there are any. Raises OSError if files stay."""
        path = self.path_of(version)
        aside = path.with_name(f"{REMOVED}{path.name}")
        if path.exists():
            path.rename(aside)
        if aside.exists():
            shutil.rmtree(aside)

    def discard_directory(self) -> None:
        """Remove the directory with all that is in it. Raises OSError if files stay."""
        if self.directory.exists():
            shutil.rmtree(self.directory)

    def _sweep(self, final: Path) -> None:
        """Remove incomplete files of this version, and of versions that a process was writing or removing."""
        (final / STABLE).unlink(missing_ok=True)
        for path in self.directory.iterdir():
            name = path.name.removeprefix(REMOVED).removesuffix(ASIDE)
            complete = name == path.name and (path / STABLE).exists()
            if VERSION_DIRECTORY.fullmatch(name) and not complete:
                shutil.rmtree(path, ignore_errors=True)


def manifest_sha256(path: Path) -> str:
    """The digest of the manifest in the version directory `path`, in hexadecimal."""
    return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
