"""Serves a version as a transaction: the engine serves the whole version, or the former one stays.

The files are verified before the engine pauses. Before it resumes, the engine is asked for the version and
the checksum of what it loaded (*prove*).

allowed? newer? ─▶ prepare: fetch, verify ─▶ load: pause, load, prove, resume ─▶ seconds
   400      409          503   422             └─ fails: kill the engine, boot the former version ─▶ 503

If the trainer sends the tensors to the engine (`collective.py`), only the manifest is fetched and verified
before. The files follow after the load, for restarts and for other servers.

While the trainer has the engine's memory (`memory.py`), a reload prepares its version, and waits. The engine
takes its memory again with the version that waits.
"""

import asyncio
import logging

from rollout_queue import clock
from rollout_queue.contract.published_policy import Manifest
from rollout_server.engine.control import EngineFailed
from rollout_server.engine.engine import Engine
from rollout_server.errors import EngineUnavailable, VersionRefused
from rollout_server.metrics import RolloutMetrics
from rollout_server.reloading.collective import NotReceived, TensorReceiver
from rollout_server.reloading.loading import EngineLoader
from rollout_server.reloading.preparation import Preparation
from rollout_server.reloading.received import ReceivedVersions
from rollout_server.reloading.seconds import Seconds
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.fetch import Fetcher
from rollout_server.weights.locations import Location
from rollout_server.weights.policy import LocalPolicy, WantedPolicy
from rollout_server.weights.store import WeightsStore

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
        self._engine, self._engine_wait_s, self._metrics = engine, settings.engine_wait_s, metrics
        self._initial = engine.policy
        self._preparation = Preparation(settings, store, fetcher, engine.policy)
        self._loader = EngineLoader(settings, engine, store, receiver, metrics, float32_engine=float32_engine)
        self._received = ReceivedVersions(store, fetcher, receiver, self.prepare)
        self.waits: LocalPolicy | None = None
        """The newest version that is prepared, and waits for the engine's memory."""
        self.swap = asyncio.Lock()
        """Held while the engine loads a version, releases its memory, or takes it again. Preparing needs no
        such lock: a reload may hold it and wait for an engine whose restart has to fetch files."""

    @property
    def loading(self) -> int | None:
        """The version that the engine loads now."""
        return self._loader.loading

    async def reload(
        self,
        wanted: WantedPolicy,
        *,
        force: bool = False,
        patient: bool = True,
        instead_of: LocalPolicy | None = None,
    ) -> Seconds:
        """Serve `wanted`. Raises ReloadError if the former version stays.

        An engine that starts is waited for if the caller is `patient`; one that dies in this reload is not.
        With `instead_of`, nothing is loaded if an earlier reload has replaced that policy in the meantime.
        """
        place = self._preparation.place(wanted)
        with self._metrics.reload():
            while True:
                async with self.swap:
                    if instead_of is not None and self._engine.policy != instead_of:
                        return Seconds()
                    if not self._engine.withheld:
                        return await self._reload(wanted, place, force, patient)
                await self._wait_for_memory(wanted, force)

    async def prefetch(self, wanted: WantedPolicy) -> Seconds:
        """Fetch and verify the files of `wanted`, for a later reload. Raises ReloadError."""
        seconds = Seconds()
        with self._metrics.reload():
            place = self._preparation.place(wanted)
            if place is None or not await self._received.can_be_received(wanted, place):
                await self.prepare(wanted, seconds)
        return seconds

    async def prepare(self, wanted: WantedPolicy, seconds: Seconds | None = None) -> LocalPolicy:
        """Fetch and verify the files of `wanted`, without the engine. Files that are here are verified again.

        Raises ReloadError.
        """
        if wanted.name is None:
            self._received.make_way(wanted)
        return await self._preparation.prepare(wanted, seconds or Seconds())

    async def restore(self, last: LocalPolicy) -> LocalPolicy:
        """The policy of which an engine can start: `last`, the one before it, or the initial one."""
        return await self._received.bootable([last, self._loader.former], self._initial)

    async def reoccupy(self) -> None:
        """Have an engine that has released its memory take it again, with the version that waits, or else
        with the one that it had. The caller holds `swap`. Raises ReloadError; the engine then restarts."""
        await self._loader.load(self.waits or self._engine.policy, Seconds())

    async def close(self) -> None:
        """End what runs in the background."""
        await self._received.close()

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

    async def _reload(
        self, wanted: WantedPolicy, place: Location | None, force: bool, patient: bool
    ) -> Seconds:
        served, seconds = self._engine.policy, Seconds()
        self._refuse_lower(wanted, force)
        if wanted.version == served.version and await self._is_same(wanted, place, served):
            await self._until_serving(patient)
            return seconds
        if wanted.version == served.version and not force:
            raise VersionRefused(f"version {wanted.version} is served already, with other content")
        if place is not None and (offered := await self._received.offered(wanted, place)):
            await self._until_serving(patient)
            patient = False
            if await self._receive(wanted, *offered, seconds):
                return seconds
        policy = await self.prepare(wanted, seconds)
        await self._until_serving(patient)
        if self._engine.policy != policy:  # an engine that was dead may have booted into it
            await self._loader.load(policy, seconds)
        return seconds

    async def _receive(
        self, wanted: WantedPolicy, policy: LocalPolicy, manifest: Manifest, seconds: Seconds
    ) -> bool:
        """Have the engine receive the tensors from the trainer. Returns False if the files have to be loaded;
        the engine has changed nothing then. Raises ReloadError."""
        began_at = clock.monotonic()
        if self._engine.policy == policy:
            return True
        try:
            async with self._received.receiver.joining(manifest, policy) as joining:
                seconds.fetch = clock.monotonic() - began_at
                await self._loader.load(policy, seconds, joining)
        except NotReceived as error:
            logger.warning("version %d is loaded from files: %s", wanted.version, error)
            seconds.fallback = str(error)
            return False
        logger.info("version %d was received from the trainer's process group", policy.version)
        self._received.follow(wanted, policy)
        return True

    def _refuse_lower(self, wanted: WantedPolicy, force: bool) -> None:
        served = self._engine.policy
        if wanted.version < served.version and not force:
            raise VersionRefused(f"version {wanted.version} is lower than {served.version}, which is served")

    async def _is_same(self, wanted: WantedPolicy, place: Location | None, served: LocalPolicy) -> bool:
        if place is None or served.manifest_sha256 is None:
            return place is None and served == self._initial
        return await self._preparation.manifest_sha256(wanted, place) == served.manifest_sha256

    async def _until_serving(self, patient: bool) -> None:
        if not (patient or self._engine.serving):
            raise EngineUnavailable(f"the engine is {self._engine.state.value}: it takes the version later")
        try:
            await self._engine.wait_until_serving(self._engine_wait_s)
        except EngineFailed as error:
            raise EngineUnavailable(str(error)) from error
