"""Copies a published set of weights onto this machine, while the engine goes on generating.

location ─▶ manifest.json ─▶ files ─▶ v00000012.part/ ─ verified, renamed ─▶ v00000012-<digest>/
"""

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx

from rollout_queue.contract.policy import MANIFEST, STABLE, FileSpec, Manifest
from rollout_server.errors import WeightsUnavailable
from rollout_server.weights.locations import FileLocation, HttpLocation, is_under
from rollout_server.weights.safetensors_file import BrokenWeights
from rollout_server.weights.verify import RESERVED, ExpectedModel, read_manifest, verify_directory

logger = logging.getLogger(__name__)

WEIGHTS_ENDINGS = (".safetensors", ".index.json", ".bin", ".pt", ".pth")
MAX_MANIFEST_BYTES = 32 * 2**20
_Write = Callable[[bytes], object]
Fingerprint = dict[str, tuple[int, int, int]]


class WeightsStore:
    """The directories that the engine loads from, one for each version and content."""

    def __init__(self, directory: Path, model_path: Path) -> None:
        self._directory = directory
        self._model_path = model_path
        self._expected: ExpectedModel | None = None
        self._verified: dict[Path, Fingerprint] = {}
        """What the files of a verified directory looked like."""

    @property
    def expected(self) -> ExpectedModel:
        """The names and shapes of the engine's model, read once."""
        if self._expected is None:
            self._expected = ExpectedModel.of(self._model_path)
        return self._expected

    def path_of(self, version: int, manifest_sha256: str) -> Path:
        # The digest is part of the name, because `force` allows other content under a known number.
        return self._directory / f"v{version:08d}-{manifest_sha256[:12]}"

    def begin(self, version: int) -> Path:
        """An empty directory for the files. Files that a killed server left there are removed."""
        part = self._directory / f"v{version:08d}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def commit(self, part: Path, target: Path) -> None:
        """Complete `part` into a directory that SGLang can start from, and give it its name."""
        for file in self._model_path.iterdir():
            # The tokenizer and config are those of the first model, unless the published set has its own.
            ours = file.is_file() and not file.name.endswith(WEIGHTS_ENDINGS) and file.name not in RESERVED
            if ours and not (part / file.name).exists():
                shutil.copyfile(file, part / file.name)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        self._verified = {target: _fingerprint(target)} | {
            directory: seen for directory, seen in self._verified.items() if directory.exists()
        }

    def verify(self, directory: Path, manifest: Manifest) -> None:
        verify_directory(directory, manifest, self.expected)

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
        self.verify(directory, read_manifest(text, version))
        self._verified[directory] = seen

    def keep_only(self, keep: set[Path]) -> None:
        """Remove the directories of all other versions."""
        for directory in self._directory.glob("v*"):
            if directory not in keep:
                shutil.rmtree(directory, ignore_errors=True)
                logger.info("removed %s", directory)


class Fetcher:
    """Reads published files, from a directory or over HTTP. Only the trainer's URL gets the admin key."""

    def __init__(self, client: httpx.AsyncClient, trainer_url: str, admin_key: str | None) -> None:
        self._client = client
        self._trainer_url = trainer_url
        self._admin_key = admin_key

    async def manifest(self, location: FileLocation | HttpLocation) -> bytes:
        if isinstance(location, FileLocation):
            return await asyncio.to_thread(_read_manifest_file, location)
        text = bytearray()
        await self._download(location, MANIFEST, MAX_MANIFEST_BYTES, text.extend)
        return bytes(text)

    async def files(self, location: FileLocation | HttpLocation, manifest: Manifest, into: Path) -> None:
        """Copy every file of the manifest. Sizes are checked here, everything else by `verify`.

        Raises BrokenWeights, LocationRefused, WeightsUnavailable, OSError.
        """
        for spec in manifest.files:
            if isinstance(location, FileLocation):
                await asyncio.to_thread(_link_or_copy, location, spec, into / spec.name)
            else:
                with (into / spec.name).open("wb") as file:
                    await self._download(location, spec.name, spec.size, file.write)

    async def _download(self, location: HttpLocation, name: str, max_bytes: int, write: _Write) -> None:
        url = f"{location.url}/{name}"
        trusted = self._admin_key is not None and is_under(location.url, self._trainer_url)
        headers = {"authorization": f"Bearer {self._admin_key}"} if trusted else {}
        received = 0
        try:
            async with self._client.stream("GET", url, headers=headers, follow_redirects=False) as response:
                if response.status_code >= 500:
                    raise WeightsUnavailable(f"{url} answers {response.status_code}")
                if response.status_code != 200:
                    raise BrokenWeights(f"cannot be fetched: HTTP {response.status_code}", file=name)
                async for chunk in response.aiter_bytes(2**20):
                    received += len(chunk)
                    if received > max_bytes:
                        raise BrokenWeights(f"is longer than {max_bytes} bytes", file=name)
                    await asyncio.to_thread(write, chunk)
        except httpx.TransportError as error:
            raise WeightsUnavailable(f"{url} cannot be fetched: {error!r}") from error


def _fingerprint(directory: Path) -> Fingerprint:
    """The inode, size and time of change of every file."""
    stats = {path.name: path.stat() for path in directory.iterdir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def manifest_digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _read_manifest_file(location: FileLocation) -> bytes:
    if not location.resolve(STABLE).is_file():
        raise BrokenWeights(f"has no {STABLE} file, so it is not a published policy")
    path = location.resolve(MANIFEST)
    if not path.is_file():
        raise BrokenWeights("is missing", file=MANIFEST)
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise BrokenWeights(f"is longer than {MAX_MANIFEST_BYTES} bytes", file=MANIFEST)
    return path.read_bytes()


def _link_or_copy(location: FileLocation, spec: FileSpec, target: Path) -> None:
    """Make a hard link, which costs neither time nor space. On another file system, make a copy."""
    source = location.resolve(spec.name)
    if not source.is_file():
        raise BrokenWeights("is missing", file=spec.name)
    if source.stat().st_size != spec.size:
        raise BrokenWeights(
            f"has {source.stat().st_size} bytes, the manifest says {spec.size}", file=spec.name
        )
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
