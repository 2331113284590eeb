"""Fetches and verifies the files of a version, for the engine to load.

allowed? ─▶ here already? ─▶ manifest ─▶ files, or changes and a base ─▶ verify ─▶ a directory of the version
  400                         422                    503                  422
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from rollout_queue import clock
from rollout_queue.contract.published_policy import (
    ADAPTER_CONFIG,
    MANIFEST,
    Manifest,
    ObjectPrefix,
    WeightDelta,
)
from rollout_server.errors import LocationRefused, WeightsUnavailable
from rollout_server.reloading.seconds import Seconds
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.failures import as_reload_errors
from rollout_server.weights.fetch import Fetcher
from rollout_server.weights.file_check import CheckedFile
from rollout_server.weights.locations import FileLocation, HttpLocation, Location, parse_location
from rollout_server.weights.policy import LocalPolicy, WantedPolicy
from rollout_server.weights.safetensors_file import BrokenWeights
from rollout_server.weights.store import WeightsStore, manifest_digest
from rollout_server.weights.verify import read_manifest

logger = logging.getLogger(__name__)


class Preparation:
    """Prepares one version of the fleet's policy, and one of each named adapter, at a time."""

    def __init__(
        self, settings: RolloutServerSettings, store: WeightsStore, fetcher: Fetcher, initial: LocalPolicy
    ) -> None:
        self._settings, self._store, self._fetcher, self._initial = settings, store, fetcher, initial
        self._one = defaultdict[str | None, asyncio.Lock](asyncio.Lock)
        """By the adapter's name; None for the fleet's policy."""

    def place(self, wanted: WantedPolicy) -> Location | None:
        """Where the files are; None for the version that the engine starts with. Raises LocationRefused."""
        if wanted.location is None:
            if wanted.version != self._initial.version:
                raise LocationRefused(f"version {wanted.version} needs a location")
            return None
        return parse_location(wanted.location, self._settings.allowed_locations)

    async def prepare(self, wanted: WantedPolicy, seconds: Seconds) -> LocalPolicy:
        """Fetch and verify the files. Files that are here are verified again. Raises ReloadError."""
        place = self.place(wanted)
        if place is None:
            return self._initial
        async with self._one[wanted.name]:
            with as_reload_errors(wanted.version):
                return await self._prepare(wanted, place, seconds)

    async def manifest_sha256(self, wanted: WantedPolicy, place: Location) -> str:
        """The digest of the version's manifest. Raises ReloadError."""
        if wanted.manifest_sha256 is not None:
            return wanted.manifest_sha256.lower()
        with as_reload_errors(wanted.version):
            return manifest_digest(await self._fetcher.manifest(place))

    async def _prepare(self, wanted: WantedPolicy, place: Location, seconds: Seconds) -> LocalPolicy:
        announced = wanted.manifest_sha256.lower() if wanted.manifest_sha256 else None
        if announced and (kept := await self._kept(wanted, announced, seconds)):
            return kept
        began_at = clock.monotonic()
        text = await self._fetcher.manifest(place)
        digest = manifest_digest(text)
        if announced not in (None, digest):
            raise BrokenWeights("its SHA-256 is not the announced one", file=MANIFEST)
        manifest = read_manifest(text, wanted.version)
        if not announced and (kept := await self._kept(wanted, digest, seconds)):
            return kept
        if wanted.name is not None and not manifest.is_adapter:
            raise BrokenWeights(f"is no adapter, and cannot be the policy {wanted.name!r}", file=MANIFEST)
        part = self._store.begin(wanted.version, wanted.name)
        try:
            checked = await self._files(wanted, place, manifest, part, digest)
            (part / MANIFEST).write_bytes(text)
            seconds.fetch, began_at = clock.monotonic() - began_at, clock.monotonic()
            await self._store.verify(part, manifest, checked)
            seconds.verify = clock.monotonic() - began_at
            target = self._store.path_of(wanted.version, digest, wanted.name)
            self._store.commit(part, target)
        finally:
            self._store.remove(part)
        return self._local(wanted, target, digest)

    async def _files(
        self,
        wanted: WantedPolicy,
        place: Location,
        manifest: Manifest,
        part: Path,
        digest: str,
    ) -> Mapping[str, CheckedFile]:
        """Fetch the files of a version: as changes, if they come over a network and their base is here."""
        peer = HttpLocation.of_peer(wanted.peer, wanted.version, digest) if wanted.peer else None
        if manifest.delta is not None and not isinstance(place, FileLocation):
            for source in (peer, place):
                try:
                    if source is not None and self._has_base(manifest.delta):
                        return await self._changed_files(source, manifest, manifest.delta, part)
                except (BrokenWeights, OSError) as error:
                    logger.warning("version %d is fetched whole: %s", manifest.version, error)
                    self._store.begin(manifest.version)
                    break  # whole files, of the peer: only so many servers may read from the location
                except WeightsUnavailable as error:
                    if source is place:
                        raise
                    logger.warning("version %d is fetched from its own location: %s", manifest.version, error)
                    peer, part = None, self._store.begin(manifest.version)
        return await self._fetcher.files(place, manifest, part, peer)

    def _has_base(self, delta: WeightDelta) -> bool:
        return self._store.path_of(delta.base_version, delta.base_manifest_sha256).exists()

    async def _changed_files(
        self, source: HttpLocation | ObjectPrefix, manifest: Manifest, delta: WeightDelta, part: Path
    ) -> Mapping[str, CheckedFile]:
        """The files, made of the base and the changes. Raises BrokenWeights, WeightsUnavailable, OSError."""
        version, digest = delta.base_version, delta.base_manifest_sha256
        base = self._store.path_of(version, digest)
        await asyncio.to_thread(self._store.verify_again, base, version, digest)
        return await self._fetcher.changed_files(source, manifest, delta, base, part)

    async def _kept(self, wanted: WantedPolicy, digest: str, seconds: Seconds) -> LocalPolicy | None:
        """The policy of this content, if an earlier reload has left its files here and they are unchanged."""
        target = self._store.path_of(wanted.version, digest, wanted.name)
        began_at = clock.monotonic()
        try:
            await asyncio.to_thread(self._store.verify_again, target, wanted.version, digest)
        except BrokenWeights:
            return None
        seconds.verify = clock.monotonic() - began_at
        return self._local(wanted, target, digest)

    def _local(self, wanted: WantedPolicy, directory: Path, digest: str) -> LocalPolicy:
        base = self._initial if (directory / ADAPTER_CONFIG).exists() else None
        return LocalPolicy(wanted.version, directory, digest, base, wanted.name)
