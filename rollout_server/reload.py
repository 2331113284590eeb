"""Loads a version as a transaction: the engine serves the whole version, or the former one stays.

The files are verified before the engine pauses. Before it resumes, the engine is asked for the version and
the checksum of what it loaded (*prove*).

allowed? newer? ─▶ fetch ─▶ verify ─▶ pause ─▶ load ─▶ prove ─▶ resume ─▶ seconds
   400      409      503      422     └─ fails: kill the engine, boot the former version ─▶ 503
"""

import asyncio
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import msgspec

from rollout_queue.contract.policies.policy import ADAPTER_CONFIG, MANIFEST, Manifest
from rollout_server.engine.control import AdapterRefused, EngineFailed
from rollout_server.engine.engine import Engine
from rollout_server.errors import (
    EngineUnavailable,
    LocationRefused,
    VersionRefused,
    WeightsRefused,
    WeightsUnavailable,
)
from rollout_server.metrics import RolloutMetrics
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.fetch import Fetcher
from rollout_server.weights.file_check import CheckedFile
from rollout_server.weights.locations import FileLocation, HttpLocation, Location, parse_location
from rollout_server.weights.policy import LocalPolicy, WantedPolicy
from rollout_server.weights.safetensors_file import BrokenWeights, weights_differ
from rollout_server.weights.store import WeightsStore, manifest_digest
from rollout_server.weights.verify import read_manifest

logger = logging.getLogger(__name__)


class Seconds(msgspec.Struct):
    """How long the parts of a reload took."""

    fetch: float = 0.0
    verify: float = 0.0
    load: float = 0.0
    paused: float = 0.0


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
        self._float32_engine = float32_engine
        self._initial = engine.policy
        self.loading: int | None = None
        """The version that the engine loads now, from its pause to its resumption."""
        self._swap = asyncio.Lock()
        self._fetch = asyncio.Lock()
        """Separate from `_swap`: while a reload holds `_swap` and waits for an engine that restarts, the
        restart may have to fetch files."""

    async def reload(
        self, wanted: WantedPolicy, *, force: bool = False, instead_of: LocalPolicy | None = None
    ) -> Seconds:
        """Serve `wanted`. Raises ReloadError if the former version stays.

        With `instead_of`, nothing is loaded if an earlier reload has replaced that policy in the meantime.
        """
        place = self._place(wanted)
        async with self._swap:
            if instead_of is not None and self._engine.policy != instead_of:
                return Seconds()
            with self._metrics.reload():
                return await self._reload(wanted, place, force)

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

    async def _reload(self, wanted: WantedPolicy, place: Location | None, force: bool) -> Seconds:
        served, seconds = self._engine.policy, Seconds()
        if wanted.version < served.version and not force:
            raise VersionRefused(f"version {wanted.version} is lower than {served.version}, which is served")
        if wanted.version == served.version and await self._is_same(wanted, place, served):
            await self._until_serving()
            return seconds
        if wanted.version == served.version and not force:
            raise VersionRefused(f"version {wanted.version} is served already, with other content")
        policy = await self.prepare(wanted, seconds)
        await self._until_serving()
        if self._engine.policy != policy:  # an engine that was dead may have booted into it
            await self._load(policy, seconds)
        return seconds

    async def _load(self, policy: LocalPolicy, seconds: Seconds) -> None:
        former = self._engine.policy
        self.loading = policy.version
        try:
            if policy.weights == former.weights:
                await self._load_adapter(policy, seconds)
            else:
                await self._swap_weights(policy, seconds)
        except AdapterRefused as error:
            raise WeightsRefused(f"version {policy.version}: {error}") from error
        except EngineFailed as error:
            logger.error(
                "version %d was not loaded: %s; the engine starts again with version %d",
                policy.version,
                error,
                former.version,
            )
            raise EngineUnavailable(f"version {policy.version} was not loaded: {error}") from error
        finally:
            self.loading = None
        whole_s = seconds.fetch + seconds.verify + seconds.load
        self._metrics.loaded(whole_s, seconds.paused)
        self._store.keep_only({policy.directory, former.directory, *self._adapters_to_keep()})
        logger.info("version %d replaces %d: paused %.3f s", policy.version, former.version, seconds.paused)

    async def _load_adapter(self, policy: LocalPolicy, seconds: Seconds) -> None:
        """Serve an adapter, or its base without one. Nothing pauses: what runs goes on as it began."""
        load_at = monotonic()
        await self._engine.prove_version(policy.weights)
        await self._engine.load_adapter(policy)
        await self._engine.prove_adapter(policy)
        seconds.load = monotonic() - load_at
        self._engine.serve(policy)

    async def _swap_weights(self, policy: LocalPolicy, seconds: Seconds) -> None:
        weights, former, client = policy.weights, self._engine.policy.weights, self._engine.client
        other = await asyncio.to_thread(
            weights_differ, weights.directory, former.directory, float32_engine=self._float32_engine
        )
        async with self._engine.swapping():
            paused_at = monotonic()
            # A request that goes on with an adapter, over other weights, would be of neither version.
            await client.pause(abort=bool(self._engine.adapters))
            load_at = monotonic()
            await client.load(str(weights.directory), weights.version)
            await self._engine.prove(weights, differs_from=former if other else None)
            await self._engine.load_adapter(policy)
            seconds.load = monotonic() - load_at
            await client.resume()
            seconds.paused = monotonic() - paused_at
            await self._engine.prove_adapter(policy)
            self._engine.serve(policy)

    def _adapters_to_keep(self) -> list[Path]:
        """The directories of the last adapters: the engine reads one again that it has dropped, and calls may
        name it."""
        lora, adapters = self._settings.lora, self._engine.adapters
        own = [engine_name for engine_name, each in adapters.items() if each.name is None]
        for engine_name in own[: -lora.max_loaded if lora else None]:
            del adapters[engine_name]
        return [each.directory for each in adapters.values()]

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
