"""Loads a version as a transaction: the engine serves the whole version, or the former one stays.

The files are verified before the engine pauses. Before it resumes, the engine is asked for the version and
the checksum of what it loaded (*prove*).

allowed? newer? ─▶ fetch ─▶ verify ─▶ pause ─▶ load ─▶ prove ─▶ resume ─▶ seconds
   400      409      503      422     └─ fails: kill the engine, boot the former version ─▶ 503

While the trainer has the engine's memory (`memory.py`), a reload prepares its version, and waits. The engine
takes its memory again with the version that waits.
"""

import asyncio
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from rollout_queue.contract.policies.policy import ADAPTER_CONFIG, MANIFEST, Manifest
from rollout_server.engine.control import EngineFailed
from rollout_server.engine.engine import Engine
from rollout_server.errors import (
    EngineUnavailable,
    LocationRefused,
    VersionRefused,
    WeightsRefused,
    WeightsUnavailable,
)
from rollout_server.loading import EngineLoader, Seconds
from rollout_server.metrics import RolloutMetrics
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.fetch import Fetcher
from rollout_server.weights.file_check import CheckedFile
from rollout_server.weights.locations import FileLocation, HttpLocation, Location, parse_location
from rollout_server.weights.policy import LocalPolicy, WantedPolicy
from rollout_server.weights.safetensors_file import BrokenWeights
from rollout_server.weights.store import WeightsStore, manifest_digest
from rollout_server.weights.verify import read_manifest

logger = logging.getLogger(__name__)


class Reloader:
    """Loads versions into the engine, one at a time."""

    def __init__(
        self,
        settings: RolloutServerSettings,
        engine: Engine,
        store: WeightsStore,
        fetcher: Fetcher,
        metrics: RolloutMetrics,
        *,
        float32_engine: bool,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._store = store
        self._fetcher = fetcher
        self._metrics = metrics
        self._loader = EngineLoader(settings, engine, store, metrics, float32_engine=float32_engine)
        self._initial = engine.policy
        self.waits: LocalPolicy | None = None
        """The newest version that is prepared, and waits for the engine's memory."""
        self.swap = asyncio.Lock()
        """Held while the engine loads a version, releases its memory, or takes it again."""
        self._fetch = asyncio.Lock()
        """Separate from `swap`: while a reload holds `swap` and waits for an engine that restarts, the
        restart may have to fetch files."""

    @property
    def loading(self) -> int | None:
        """The version that the engine loads now."""
        return self._loader.loading

    async def reload(
        self, wanted: WantedPolicy, *, force: bool = False, instead_of: LocalPolicy | None = None
    ) -> Seconds:
        """Serve `wanted`. Raises ReloadError if the former version stays.

        With `instead_of`, nothing is loaded if an earlier reload has replaced that policy in the meantime.
        """
        place = self._place(wanted)
        with self._metrics.reload():
            while True:
                async with self.swap:
                    if instead_of is not None and self._engine.policy != instead_of:
                        return Seconds()
                    if not self._engine.withheld:
                        return await self._reload(wanted, place, force)
                await self._wait_for_memory(wanted, force)

    async def prefetch(self, wanted: WantedPolicy) -> Seconds:
        """Fetch and verify the files of `wanted`, for a later reload. Raises ReloadError."""
        seconds = Seconds()
        with self._metrics.reload():
            await self.prepare(wanted, seconds)
        return seconds

    async def prepare(self, wanted: WantedPolicy, seconds: Seconds | None = None) -> LocalPolicy:
        """Fetch and verify the files of `wanted`, without the engine. Files that are here are verified again.

        Raises ReloadError.
        """
        seconds = seconds or Seconds()
        place = self._place(wanted)
        if place is None:
            return self._initial
        async with self._fetch:
            with _as_reload_errors(wanted.version):
                return await self._prepare(wanted, place, seconds)

    async def _wait_for_memory(self, wanted: WantedPolicy, force: bool) -> None:
        """Wait until the engine takes its memory again, with this version if it is to be served next."""
        self._refuse_lower(wanted, force)
        policy = await self.prepare(wanted)
        if force or policy.version > self._engine.policy.version:
            self.waits = policy
        try:
            await self._engine.until_memory()
        finally:
            if self.waits == policy:
                self.waits = None

    async def _reload(self, wanted: WantedPolicy, place: Location | None, force: bool) -> Seconds:
        served, seconds = self._engine.policy, Seconds()
        self._refuse_lower(wanted, force)
        if wanted.version == served.version and await self._is_same(wanted, place, served):
            await self._until_serving()
            return seconds
        if wanted.version == served.version and not force:
            raise VersionRefused(f"version {wanted.version} is served already, with other content")
        policy = await self.prepare(wanted, seconds)
        await self._until_serving()
        if self._engine.policy != policy:  # an engine that was dead may have booted into it
            await self._loader.load(policy, seconds)
        return seconds

    def _refuse_lower(self, wanted: WantedPolicy, force: bool) -> None:
        served = self._engine.policy
        if wanted.version < served.version and not force:
            raise VersionRefused(f"version {wanted.version} is lower than {served.version}, which is served")

    async def reoccupy(self) -> None:
        """Have an engine that has released its memory take it again, with the version that waits, or else
        with the one that it had. The caller holds `swap`. Raises ReloadError; the engine then restarts."""
        await self._loader.load(self.waits or self._engine.policy, Seconds())

    async def _is_same(self, wanted: WantedPolicy, place: Location | None, served: LocalPolicy) -> bool:
        if place is None or served.manifest_sha256 is None:
            return place is None and served == self._initial
        if wanted.manifest_sha256 is not None:
            return wanted.manifest_sha256.lower() == served.manifest_sha256
        with _as_reload_errors(wanted.version):
            return manifest_digest(await self._fetcher.manifest(place)) == served.manifest_sha256

    async def _prepare(self, wanted: WantedPolicy, place: Location, seconds: Seconds) -> LocalPolicy:
        announced = wanted.manifest_sha256.lower() if wanted.manifest_sha256 else None
        if announced and (kept := await self._kept(wanted, announced, seconds)):
            return kept
        began_at = monotonic()
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
            seconds.fetch, began_at = monotonic() - began_at, monotonic()
            await self._store.verify(part, manifest, checked)
            seconds.verify = monotonic() - began_at
            target = self._store.path_of(wanted.version, digest, wanted.name)
            self._store.commit(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
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
        delta = manifest.delta
        if delta is not None and not isinstance(place, FileLocation):
            base = self._store.path_of(delta.base_version, delta.base_manifest_sha256)
            try:
                if base.exists():
                    await asyncio.to_thread(
                        self._store.verify_again, base, delta.base_version, delta.base_manifest_sha256
                    )
                    return await self._fetcher.changed_files(place, manifest, delta, base, part)
            except (BrokenWeights, OSError) as error:
                logger.warning("version %d is fetched whole: %s", manifest.version, error)
                self._store.begin(manifest.version)
        peer = wanted.peer and HttpLocation.of_peer(wanted.peer, wanted.version, digest)
        return await self._fetcher.files(place, manifest, part, peer or None)

    async def _kept(self, wanted: WantedPolicy, digest: str, seconds: Seconds) -> LocalPolicy | None:
        """The policy of this content, if an earlier reload has left its files here and they are unchanged."""
        target = self._store.path_of(wanted.version, digest, wanted.name)
        began_at = monotonic()
        try:
            await asyncio.to_thread(self._store.verify_again, target, wanted.version, digest)
        except BrokenWeights:
            return None
        seconds.verify = monotonic() - began_at
        return self._local(wanted, target, digest)

    def _local(self, wanted: WantedPolicy, directory: Path, digest: str) -> LocalPolicy:
        base = self._initial if (directory / ADAPTER_CONFIG).exists() else None
        return LocalPolicy(wanted.version, directory, digest, base, wanted.name)

    def _place(self, wanted: WantedPolicy) -> Location | None:
        if wanted.location is None:
            if wanted.version != self._initial.version:
                raise LocationRefused(f"version {wanted.version} needs a location")
            return None
        return parse_location(wanted.location, self._settings.allowed_locations)

    async def _until_serving(self) -> None:
        try:
            await self._engine.wait_until_serving(self._settings.engine_wait_s)
        except EngineFailed as error:
            raise EngineUnavailable(str(error)) from error


@contextmanager
def _as_reload_errors(version: int) -> Iterator[None]:
    try:
        yield
    except BrokenWeights as error:
        raise WeightsRefused(f"version {version}: {error}") from error
    except OSError as error:
        raise WeightsUnavailable(f"version {version}: {error}") from error
