"""Decides which files the engine may load: fetches and verifies those of a version.

allowed? ─▶ here already? ─▶ manifest ─▶ files, or changes and a base ─▶ verify ─▶ a directory of the version
  400                         422                    503                  422

The files of versions that the engine receives as tensors follow after the load:

manifest says `collective`, and the files are not here ─▶ the engine receives ─▶ the files are fetched
engine starts again ─▶ files of the last version ─▶ else of the one before ─▶ else the initial model
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from rollout_queue import clock
from rollout_queue.contract.published_policy import (
    ADAPTER_CONFIG,
    MANIFEST,
    Manifest,
    ObjectPrefix,
    WeightDelta,
)
from rollout_server.collective import TensorReceiver
from rollout_server.errors import LocationRefused, ReloadError, WeightsRefused, WeightsUnavailable
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.fetch import Fetcher
from rollout_server.weights.locations import (
    FileLocation,
    HttpLocation,
    LocalPolicy,
    Location,
    WantedPolicy,
    parse_location,
)
from rollout_server.weights.verify import read_manifest, verify_tensors
from rollout_server.weights.weight_files import BrokenWeights, CheckedFile
from rollout_server.weights.weights_store import WeightsStore, manifest_digest

logger = logging.getLogger(__name__)


class Seconds(msgspec.Struct):
    """The `ReloadSeconds` of a reload so far."""

    fetch: float = 0.0
    verify: float = 0.0
    load: float = 0.0
    paused: float = 0.0
    fallback: str | None = None
    """Why the files were loaded, although the trainer offered to send the tensors."""


@contextmanager
def as_reload_errors(version: int) -> Iterator[None]:
    """Raises WeightsRefused for broken files, and WeightsUnavailable if they cannot be read now."""
    try:
        yield
    except BrokenWeights as error:
        raise WeightsRefused(f"version {version}: {error}") from error
    except OSError as error:
        raise WeightsUnavailable(f"version {version}: {error}") from error


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


Prepare = Callable[[WantedPolicy], Awaitable[LocalPolicy]]
"""Fetches and verifies the files of a version. Raises ReloadError."""


class ReceivedVersions:
    """Knows the version that the engine received last, and fetches its files."""

    def __init__(
        self, store: WeightsStore, fetcher: Fetcher, receiver: TensorReceiver, prepare: Prepare
    ) -> None:
        self._store, self._fetcher = store, fetcher
        self.receiver = receiver
        self._prepare = prepare
        self._last: tuple[WantedPolicy, LocalPolicy] | None = None
        self._fetching: asyncio.Task[None] | None = None

    async def offered(self, wanted: WantedPolicy, place: Location) -> tuple[LocalPolicy, Manifest] | None:
        """The version and its manifest, if the trainer sends its tensors and they fit the engine's model;
        None if its files are here already, or have to be loaded. Raises ReloadError."""
        announced = wanted.manifest_sha256.lower() if wanted.manifest_sha256 else None
        if announced and self._store.path_of(wanted.version, announced).exists():
            return None
        with as_reload_errors(wanted.version):
            text = await self._fetcher.manifest(place)
            digest = manifest_digest(text)
            if announced not in (None, digest):
                raise BrokenWeights("its SHA-256 is not the announced one", file=MANIFEST)
            manifest = read_manifest(text, wanted.version)
            policy = LocalPolicy(wanted.version, self._store.path_of(wanted.version, digest), digest)
            if not manifest.collective or policy.directory.exists():
                return None
            verify_tensors(manifest, self._store.expected)
            return policy, manifest

    async def can_be_received(self, wanted: WantedPolicy, place: Location) -> bool:
        """Whether the trainer has the tensors now. Raises ReloadError."""
        offered = await self.offered(wanted, place)
        return offered is not None and await self.receiver.offered(wanted.version)

    def follow(self, wanted: WantedPolicy, policy: LocalPolicy) -> None:
        """The engine has received `policy`: fetch its files in the background. Restarts of the engine and
        other servers need them."""
        if self._fetching is not None:
            self._fetching.cancel()
        wanted = replace(wanted, manifest_sha256=policy.manifest_sha256)  # then files that are here suffice
        self._last = (wanted, policy)
        self._fetching = asyncio.create_task(self._fetch(wanted), name="files of a received version")

    def make_way(self, wanted: WantedPolicy) -> None:
        """Other files are to be fetched now."""
        if self._fetching is not None and self._last is not None and self._last[0].version != wanted.version:
            self._fetching.cancel()

    async def bootable(self, candidates: list[LocalPolicy], initial: LocalPolicy) -> LocalPolicy:
        """The first candidate of which an engine can start, else `initial`. Files of a received version that
        are not here are fetched."""
        for policy in candidates:
            if policy.manifest_sha256 is None:
                return policy
            try:
                if self._last is not None and self._last[1] == policy:
                    return await self._prepare(self._last[0])
                with as_reload_errors(policy.version):
                    await asyncio.to_thread(
                        self._store.verify_again, policy.directory, policy.version, policy.manifest_sha256
                    )
                return policy
            except ReloadError as error:
                logger.error("the engine cannot start with version %d: %s", policy.version, error)
        return initial

    async def close(self) -> None:
        """End what runs in the background."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    async def _fetch(self, wanted: WantedPolicy) -> None:
        try:
            await self._prepare(wanted)
        except ReloadError as error:
            logger.warning("version %d is served, and its files are not here: %s", wanted.version, error)
