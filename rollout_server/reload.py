"""Loads a version as a transaction: the engine serves the whole version, or the former one stays.

The files are verified before the engine pauses. Before it resumes, the engine is asked for the version and
the checksum of what it loaded (*prove*).

allowed? newer? ─▶ fetch ─▶ verify ─▶ pause ─▶ load ─▶ prove ─▶ resume ─▶ seconds
   400      409      503      422     └─ fails: kill the engine, boot the former version ─▶ 503

If the trainer sends the tensors to the engine (`collective.py`), only the manifest is fetched and verified
before. The files follow after the load, for restarts and for other servers.
"""

import asyncio
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

from rollout_queue.contract.policies.policy import MANIFEST, Manifest
from rollout_queue.protocol.collective import Joining
from rollout_server.collective import NotReceived, TensorReceiver
from rollout_server.engine.control import EngineFailed
from rollout_server.engine.engine import Engine
from rollout_server.errors import EngineUnavailable, LocationRefused, VersionRefused
from rollout_server.metrics import RolloutMetrics
from rollout_server.received import ReceivedVersions
from rollout_server.seconds import Seconds
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.failures import as_reload_errors
from rollout_server.weights.fetch import Fetcher
from rollout_server.weights.file_check import CheckedFile
from rollout_server.weights.locations import FileLocation, HttpLocation, parse_location
from rollout_server.weights.policy import LocalPolicy, WantedPolicy
from rollout_server.weights.safetensors_file import BrokenWeights, weights_differ
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
        receiver: TensorReceiver,
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
        self._former = engine.policy
        """The policy that the engine served before."""
        self._received = ReceivedVersions(store, fetcher, receiver, self.prepare)
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
            place = self._place(wanted)
            if place is None or not await self._received.can_be_received(wanted, place):
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
        self._received.make_way(wanted)
        async with self._fetch:
            with as_reload_errors(wanted.version):
                return await self._prepare(wanted, place, seconds)

    async def restore(self, last: LocalPolicy) -> LocalPolicy:
        """The policy of which an engine can start: `last`, the one before it, or the initial one."""
        return await self._received.bootable([last, self._former], self._initial)

    async def close(self) -> None:
        """End what runs in the background."""
        await self._received.close()

    async def _reload(
        self, wanted: WantedPolicy, place: FileLocation | HttpLocation | None, force: bool
    ) -> Seconds:
        served, seconds = self._engine.policy, Seconds()
        if wanted.version < served.version and not force:
            raise VersionRefused(f"version {wanted.version} is lower than {served.version}, which is served")
        if wanted.version == served.version and await self._is_same(wanted, place, served):
            await self._until_serving()
            return seconds
        if wanted.version == served.version and not force:
            raise VersionRefused(f"version {wanted.version} is served already, with other content")
        if place is not None and await self._receive(wanted, place, seconds):
            return seconds
        policy = await self.prepare(wanted, seconds)
        await self._until_serving()
        if self._engine.policy != policy:  # an engine that was dead may have booted into it
            await self._load(policy, seconds)
        return seconds

    async def _receive(
        self, wanted: WantedPolicy, place: FileLocation | HttpLocation, seconds: Seconds
    ) -> bool:
        """Have the engine receive the tensors from the trainer, if that sends them. Returns False if the
        files have to be loaded; the engine has changed nothing then. Raises ReloadError."""
        began_at = monotonic()
        if (offered := await self._received.offered(wanted, place)) is None:
            return False
        policy, manifest = offered
        await self._until_serving()
        if self._engine.policy == policy:
            return True
        try:
            async with self._received.receiver.joining(manifest, policy) as joining:
                seconds.fetch = monotonic() - began_at
                await self._load(policy, seconds, joining)
        except NotReceived as error:
            logger.warning("version %d is loaded from files: %s", wanted.version, error)
            seconds.fallback = str(error)
            return False
        logger.info("version %d was received from the trainer's process group", policy.version)
        self._received.follow(wanted, policy)
        return True

    async def _load(self, policy: LocalPolicy, seconds: Seconds, joining: Joining | None = None) -> None:
        """Load files, or with `joining` what the trainer sends. Raises EngineUnavailable, and NotReceived if
        the trainer sends nothing and the engine goes on as before."""
        former, client = self._engine.policy, self._engine.client
        other = await asyncio.to_thread(self._differ, policy, former, joining)
        not_sent: NotReceived | None = None
        self.loading = policy.version
        try:
            async with self._engine.swapping():
                paused_at = monotonic()
                await client.pause()
                load_at = monotonic()
                try:
                    if joining is None:
                        await client.load(str(policy.directory), policy.version)
                    else:
                        await self._received.receiver.receive(joining, policy)
                    await self._engine.prove(policy, differs_from=former if other else None)
                except NotReceived as error:
                    not_sent = error
                seconds.load = monotonic() - load_at
                await client.resume()
                seconds.paused += monotonic() - paused_at
                if not_sent is None:
                    self._engine.serve(policy)
        except EngineFailed as error:
            if joining is not None:
                self._received.receiver.rest()
            logger.error(
                "version %d was not loaded: %s; the engine starts again with version %d",
                policy.version,
                error,
                former.version,
            )
            raise EngineUnavailable(f"version {policy.version} was not loaded: {error}") from error
        finally:
            self.loading = None
        if not_sent is not None:
            raise not_sent
        self._former = former
        whole_s = seconds.fetch + seconds.verify + seconds.load
        self._metrics.loaded(whole_s, seconds.paused)
        self._store.keep_only({policy.directory, former.directory})
        logger.info("version %d replaces %d: paused %.3f s", policy.version, former.version, seconds.paused)

    def _differ(self, policy: LocalPolicy, former: LocalPolicy, joining: Joining | None) -> bool:
        """Whether the engine certainly holds other weights after the load."""
        if joining is not None:
            return self._received.receiver.differs(joining, former, float32_engine=self._float32_engine)
        return weights_differ(policy.directory, former.directory, float32_engine=self._float32_engine)

    async def _is_same(
        self, wanted: WantedPolicy, place: FileLocation | HttpLocation | None, served: LocalPolicy
    ) -> bool:
        if place is None or served.manifest_sha256 is None:
            return place is None and served == self._initial
        if wanted.manifest_sha256 is not None:
            return wanted.manifest_sha256.lower() == served.manifest_sha256
        with as_reload_errors(wanted.version):
            return manifest_digest(await self._fetcher.manifest(place)) == served.manifest_sha256

    async def _prepare(
        self, wanted: WantedPolicy, place: FileLocation | HttpLocation, seconds: Seconds
    ) -> LocalPolicy:
        announced = wanted.manifest_sha256.lower() if wanted.manifest_sha256 else None
        if announced and (kept := await self._kept(wanted.version, announced, seconds)):
            return kept
        began_at = monotonic()
        text = await self._fetcher.manifest(place)
        digest = manifest_digest(text)
        if announced not in (None, digest):
            raise BrokenWeights("its SHA-256 is not the announced one", file=MANIFEST)
        manifest = read_manifest(text, wanted.version)
        if not announced and (kept := await self._kept(wanted.version, digest, seconds)):
            return kept
        part = self._store.begin(wanted.version)
        try:
            checked = await self._files(wanted, place, manifest, part, digest)
            (part / MANIFEST).write_bytes(text)
            seconds.fetch, began_at = monotonic() - began_at, monotonic()
            await self._store.verify(part, manifest, checked)
            seconds.verify = monotonic() - began_at
            target = self._store.path_of(wanted.version, digest)
            self._store.commit(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return LocalPolicy(wanted.version, target, digest)

    async def _files(
        self,
        wanted: WantedPolicy,
        place: FileLocation | HttpLocation,
        manifest: Manifest,
        part: Path,
        digest: str,
    ) -> Mapping[str, CheckedFile]:
        """Fetch the files of a version: as changes, if they come over a network and their base is here."""
        delta = manifest.delta
        if delta is not None and isinstance(place, HttpLocation):
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

    async def _kept(self, version: int, digest: str, seconds: Seconds) -> LocalPolicy | None:
        """The policy of this content, if an earlier reload has left its files here and they are unchanged."""
        target = self._store.path_of(version, digest)
        began_at = monotonic()
        try:
            await asyncio.to_thread(self._store.verify_again, target, version, digest)
        except BrokenWeights:
            return None
        seconds.verify = monotonic() - began_at
        return LocalPolicy(version, target, digest)

    def _place(self, wanted: WantedPolicy) -> FileLocation | HttpLocation | None:
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
