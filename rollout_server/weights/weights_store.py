"""The versions on this machine: directories that the engine loads from, and other servers read. Which of them
are kept, `reload.py` decides.

v00000012.part/ ─ verified, renamed ─▶ v00000012-<digest>/ ─ not needed any more ─▶ removed-<id>/

To remove a large version takes seconds. So its directory only gets another name at once, and another thread
removes it.

Each rollout server claims a directory of weights that no other server uses, even if they share a disk. The
operating system keeps the claim until the process ends, however it ends.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from rollout_queue.contract.ids import new_id
from rollout_queue.contract.published_policy import ADAPTER_CONFIG, MANIFEST, Manifest
from rollout_queue.model_files import small_files
from rollout_server.settings import EngineLoraSettings, RolloutServerSettings
from rollout_server.weights.verify import ExpectedModel, read_manifest, verify_directory
from rollout_server.weights.weight_files import BrokenWeights, CheckedFile

logger = logging.getLogger(__name__)


MOST_SERVERS = 1024


class DirectoryTaken(Exception):
    """Another process uses the directory."""


@dataclass(frozen=True)
class WeightsClaim:
    """A directory that belongs to this process until it ends, or releases it."""

    directory: Path
    lock: int
    """A file descriptor: a file object that nobody keeps would be closed."""

    def release(self) -> None:
        os.close(self.lock)


def claim_weights(settings: RolloutServerSettings) -> WeightsClaim:
    """Claim the directory of the server's id. A server without an id gets the first free directory.

    Raises DirectoryTaken, OSError.
    """
    root = settings.weights_dir.absolute()
    root.mkdir(parents=True, exist_ok=True)
    if settings.id is not None:
        claim = _claimed(root / settings.id)
        if claim is None:
            raise DirectoryTaken(
                f"another rollout server uses the weights in {root / settings.id}: give each server its own "
                "rollout_server.id, or none"
            )
        return claim
    for number in range(MOST_SERVERS):
        if claim := _claimed(root / f"server-{number}"):
            return claim
    raise DirectoryTaken(f"{MOST_SERVERS} rollout servers use the directories in {root}")


def _claimed(directory: Path) -> WeightsClaim | None:
    lock = os.open(directory.with_name(f"{directory.name}.lock"), os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return WeightsClaim(directory, lock)


REMOVED = "removed-"
"""How the directories begin that are being removed."""
NAMED = "adapter-"
"""How the directories of adapters begin that are policies of their own."""
Fingerprint = dict[str, tuple[int, int, int]]


class WeightsStore:
    """The directories that the engine loads from, one for each version and content."""

    def __init__(self, directory: Path, model_path: Path, lora: EngineLoraSettings | None = None) -> None:
        """Raises BrokenWeights, OSError."""
        self._directory = directory
        self._model_path = model_path
        self.expected = ExpectedModel.of(model_path, lora)
        """What the engine's model has."""
        self._verified: dict[Path, Fingerprint] = {}
        """What the files of a verified directory looked like."""
        self._newest: set[Path] = set()
        """The directory of the fleet's policy that is being filled, or the one that was completed last."""
        self._remover = ThreadPoolExecutor(1, "remover")
        for directory in self._directory.glob(f"{REMOVED}*"):  # of a server that was killed
            self._remover.submit(shutil.rmtree, directory, ignore_errors=True)

    def path_of(self, version: int, manifest_sha256: str, name: str | None = None) -> Path:
        """The directory of a version of the fleet's policy, or of the adapter `name`."""
        # The digest is part of the name, because `force` allows other content under a known number.
        return self._directory / f"{_prefix(name)}v{version:08d}-{manifest_sha256[:12]}"

    def begin(self, version: int, name: str | None = None) -> Path:
        """An empty directory for the files. Files that a killed server left there are removed."""
        part = self._directory / f"{_prefix(name)}v{version:08d}.part"
        self.remove(part)
        part.mkdir(parents=True)
        if name is None:
            self._newest = {part}
        return part

    def commit(self, part: Path, target: Path) -> None:
        """Complete `part` into a directory that SGLang can start from, and give it its name."""
        is_adapter = (part / ADAPTER_CONFIG).exists()
        kept, left_out = small_files(self._model_path)
        code = [
            file for file in left_out if file.suffix == ".py"
        ]  # of this machine's model, not of a version
        for file in [] if is_adapter else [*kept, *code]:
            # The tokenizer and config are those of the first model, unless the published set has its own.
            if not (part / file.name).exists():
                shutil.copyfile(file, part / file.name)
        self.remove(target)
        part.rename(target)
        if part in self._newest:
            self._newest = {target}
        self._verified[target] = _fingerprint(target)

    def offered(self, version: int, manifest_sha256: str, name: str) -> Path | None:
        """A file of a verified version, for another server; None if it is not here."""
        directory = self.path_of(version, manifest_sha256)
        return directory / name if name in self._verified.get(directory, {}) else None

    async def verify(self, directory: Path, manifest: Manifest, checked: Mapping[str, CheckedFile]) -> None:
        """Verify the files in a thread, which ends if the caller is cancelled. Raises BrokenWeights and
        OSError."""
        ended = Event()
        try:
            await asyncio.to_thread(
                verify_directory, directory, manifest, self.expected, checked, ended.is_set
            )
        finally:
            ended.set()

    def verify_again(self, directory: Path, version: int, manifest_sha256: str) -> None:
        """Verify a kept directory before an engine loads from it: hard-linked files may have changed. Files
        that this process has verified are read again only if they look changed.

        Raises BrokenWeights.
        """
        try:
            text = (directory / MANIFEST).read_bytes()
        except OSError as error:
            raise BrokenWeights(f"cannot be read: {error}", file=MANIFEST) from error
        if manifest_digest(text) != manifest_sha256:
            raise BrokenWeights("has changed since it was fetched", file=MANIFEST)
        if self._verified.get(directory) == (seen := _fingerprint(directory)):
            return
        verify_directory(directory, read_manifest(text, version), self.expected)
        self._verified[directory] = seen

    def keep_only(self, keep: set[Path]) -> None:
        """Remove the directories of all other versions, except the one that was fetched last: it may be
        loaded next."""
        for directory in self._directory.glob("v*"):
            if directory not in keep | self._newest:
                self.remove(directory)
                logger.info("removed %s", directory)

    def keep_only_named(self, keep: Set[Path]) -> None:
        """Remove the directories of all other adapters that have a name."""
        for directory in set(self._directory.glob(f"{NAMED}*")) - keep:
            self.remove(directory)
            logger.info("removed %s", directory)

    def remove(self, directory: Path) -> None:
        """Remove a directory, if it is there."""
        self._verified.pop(directory, None)
        removed = self._directory / f"{REMOVED}{new_id()}"
        with suppress(OSError):
            directory.rename(removed)
            self._remover.submit(shutil.rmtree, removed, ignore_errors=True)


def _prefix(name: str | None) -> str:
    return "" if name is None else f"{NAMED}{name}-"


def _fingerprint(directory: Path) -> Fingerprint:
    """The inode, size and time of change of every file."""
    stats = {path.name: path.stat() for path in directory.iterdir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def manifest_digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
