"""The directory of published versions: each one complete, with a manifest of its files' digests.

weights ─▶ v00000012.tmp/ ─ sync ─ rename ─▶ v00000012/ (…, manifest.json, STABLE last)
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rollout_queue.contract.policies.policy import (
    MANIFEST,
    STABLE,
    FileSpec,
    Manifest,
    WeightDelta,
    is_adapter,
    sha256_of,
)
from trainer_service.model.huggingface import copy_small_files
from trainer_service.storage.delta_files import write_delta
from trainer_service.storage.disk import written
from trainer_service.storage.files import sync_directory, sync_tree

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

        Raises DiskTrouble if the disk refuses; no file of the version is left then.
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
            files += [_small_file(each) for each in sorted(aside.iterdir()) if each.name not in written]
        manifest = Manifest(
            version=version,
            step=step,
            files=files,
            delta=self._delta(version, aside, files),
            collective=self._collective,
        )
        (aside / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        sync_tree(aside)
        aside.rename(final)
        (final / STABLE).touch()
        sync_tree(final)
        sync_directory(self.directory)

    def _delta(self, version: int, aside: Path, files: Sequence[FileSpec]) -> WeightDelta | None:
        """Write the changes against the version before, if there is one and no anchor is due."""
        earlier = [each for each in self.versions() if each < version]
        if self._anchor_every is None or not earlier:
            return None
        base = self.path_of(earlier[-1])
        text = (base / MANIFEST).read_bytes()
        before = msgspec.json.decode(text, type=Manifest)
        chain = 1 + (before.delta.chain if before.delta is not None else 0)
        if chain >= self._anchor_every or is_adapter(files) or before.is_adapter:
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


def _small_file(path: Path) -> FileSpec:
    return FileSpec(path.name, path.stat().st_size, sha256_of(path))
