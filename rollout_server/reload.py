"""Decides which version the engine serves: one whole version, or the former one stays.

The files are verified before the engine pauses. Before it resumes, the engine is asked for the version and
the checksum of what it loaded (*prove*).

allowed? newer? ─▶ prepare: fetch, verify ─▶ load: pause, load, prove, resume ─▶ seconds
   400      409          503   422             └─ fails: kill the engine, boot the former version ─▶ 503

If the trainer sends the tensors to the engine (`collective.py`), only the manifest is fetched and verified
before. The files follow after the load, for restarts and for other servers.

While the trainer has the engine's memory (`EngineMemory`), a reload prepares its version, and waits. The
engine takes its memory again with the version that waits.

EngineLoader decides how the engine changes over to a prepared version:

weights   pause ─▶ load ─▶ prove ─▶ resume        fails: kill the engine, boot the former version
adapter   load ─▶ prove, while the engine goes on

ReloadRequests decide which request still counts. Each can be ended until the engine pauses.

POST /reload ──▶ newest push? ──▶ run ──▶ prepare ─▶ load ─▶ answer
DELETE /reload/{version} ─────────────▶ abort ┘ (not while it loads)
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rollout_queue import clock
from rollout_queue.contract.published_policy import Manifest
from rollout_queue.protocol.rollout_server_messages import Joining
from rollout_server.collective import NotReceived, TensorReceiver
from rollout_server.engine.control import KV_CACHE, WEIGHTS, AdapterRefused, EngineFailed
from rollout_server.engine.engine import Engine
from rollout_server.errors import (
    EngineUnavailable,
    PushReplaced,
    ReloadAborted,
    VersionRefused,
    WeightsRefused,
)
from rollout_server.preparation import Preparation, ReceivedVersions, Seconds
from rollout_server.rollout_metrics import RolloutMetrics
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.fetch import Fetcher
from rollout_server.weights.locations import LocalPolicy, Location, WantedPolicy
from rollout_server.weights.weight_files import BrokenWeights, weights_differ
from rollout_server.weights.weights_store import WeightsStore

logger = logging.getLogger(__name__)


class EngineLoader:
    """Loads one version at a time; the caller sees to that."""

    def __init__(
        self,
        settings: RolloutServerSettings,
        engine: Engine,
        store: WeightsStore,
        receiver: TensorReceiver,
        metrics: RolloutMetrics,
        *,
        float32_engine: bool,
    ) -> None:
        self._settings, self._engine, self._store, self._metrics = settings, engine, store, metrics
        self._receiver, self._float32_engine = receiver, float32_engine
        self.loading: int | None = None
        """The version that the engine loads now."""
        self.former = engine.policy
        """The policy that the engine served before."""

    async def load(self, policy: LocalPolicy, seconds: Seconds, joining: Joining | None = None) -> None:
        """Serve the version, from its files, or with `joining` from what the trainer sends.

        Raises EngineUnavailable, and WeightsRefused if the engine refuses an adapter: the former version
        stays then. Raises NotReceived if the trainer sends nothing, and the engine goes on as before.
        """
        former = self._engine.policy
        if self._engine.held and policy.adapter_name is not None:  # it is proved by a call
            raise EngineUnavailable(f"version {policy.version} is an adapter, and the engine is paused")
        self.loading = policy.version
        try:
            if policy.weights == former.weights and not self._engine.released:
                await self._load_adapter(policy, seconds)
            else:
                await self._load_weights(policy, seconds, joining)
        except AdapterRefused as error:
            raise WeightsRefused(f"version {policy.version}: {error}") from error
        except EngineFailed as error:
            if joining is not None:
                self._receiver.rest()
            logger.error("version %d was not loaded: %s", policy.version, error)
            raise EngineUnavailable(f"version {policy.version} was not loaded: {error}") from error
        finally:
            self.loading = None
        self._metrics.loaded(seconds.fetch + seconds.verify + seconds.load, seconds.paused)
        if policy == former:
            logger.info("version %d is loaded again: %.3f s", policy.version, seconds.paused)
            return
        self.former = former
        self._store.keep_only({policy.directory, former.directory, *self._adapters_to_keep()})
        logger.info("version %d replaces %d: paused %.3f s", policy.version, former.version, seconds.paused)

    async def _load_weights(self, policy: LocalPolicy, seconds: Seconds, joining: Joining | None) -> None:
        """Load the weights of the version, and then its adapter, if it is one."""
        engine, client, weights = self._engine, self._engine.client, policy.weights
        former, released = engine.policy.weights, engine.released
        other = weights != former and await asyncio.to_thread(self._differ, weights, former, joining)
        not_sent: NotReceived | None = None
        async with engine.swapping():
            paused_at = clock.monotonic()
            if released:  # it is paused, and its weights come back without their content
                await client.reoccupy(WEIGHTS)
            else:
                # A request that goes on with an adapter, over other weights, would be of neither version.
                await client.pause(abort=bool(engine.adapters.loaded))
            load_at = clock.monotonic()
            try:
                if joining is None:
                    await client.load(str(weights.directory), weights.version)
                else:
                    await self._receiver.receive(joining, policy)
                await engine.prove(weights, differs_from=former if other else None)
                await engine.adapters.load(policy)
            except NotReceived as error:
                not_sent = error
            seconds.load = clock.monotonic() - load_at
            if released:
                await client.reoccupy(KV_CACHE)
            if not engine.held:
                await client.resume()
            seconds.paused += clock.monotonic() - paused_at
            if not_sent is None:
                await engine.adapters.prove(policy)
                engine.serve(policy)
        if not_sent is not None:
            raise not_sent

    def _differ(self, weights: LocalPolicy, former: LocalPolicy, joining: Joining | None) -> bool:
        """Whether the engine certainly holds other weights after the load. Files that cannot be read say
        nothing: the former version's may be damaged by now."""
        try:
            if joining is not None:
                return self._receiver.differs(joining, former, float32_engine=self._float32_engine)
            return weights_differ(weights.directory, former.directory, float32_engine=self._float32_engine)
        except (BrokenWeights, OSError) as error:
            logger.warning("versions %d and %d are not compared: %s", weights.version, former.version, error)
            return False

    async def _load_adapter(self, policy: LocalPolicy, seconds: Seconds) -> None:
        """Serve an adapter, or its base without one. Nothing pauses: what runs goes on as it began."""
        load_at = clock.monotonic()
        await self._engine.prove_version(policy.weights)
        await self._engine.adapters.load(policy)
        await self._engine.adapters.prove(policy)
        seconds.load = clock.monotonic() - load_at
        self._engine.serve(policy)

    def _adapters_to_keep(self) -> list[Path]:
        """The directories of the last adapters: the engine reads one again that it has dropped, and calls may
        name it."""
        lora, adapters = self._settings.lora, self._engine.adapters
        own = [engine_name for engine_name, each in adapters.loaded.items() if each.name is None]
        for engine_name in own[: -lora.max_loaded if lora else None]:
            adapters.forget(engine_name)
        return [each.directory for each in adapters.loaded.values()]


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
        """Fetch and verify the files of `wanted`, without the engine. Raises ReloadError."""
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


T = TypeVar("T")


class ReloadRequests:
    """The running requests, by version, and the newest push that the server has seen."""

    def __init__(self, loading: Callable[[], int | None]) -> None:
        """`loading` returns the version that the engine loads now: that cannot be ended."""
        self._loading = loading
        self._running: dict[asyncio.Task[Any], int] = {}
        self._aborted: set[asyncio.Task[Any]] = set()
        self._newest_push = 0
        self._proved: tuple[int, int] | None = None

    @property
    def versions(self) -> frozenset[int]:
        """The versions that requests load or prepare now."""
        return frozenset(self._running.values())

    def proved(self, version: int, push: int | None) -> None:
        """The engine serves the version, as this push asked for; None is an operator's request."""
        self._proved = None if push is None else (version, push)

    def push_of(self, version: int) -> int | None:
        """The push that has brought the version, which is served now; None if none has."""
        return None if self._proved is None or self._proved[0] != version else self._proved[1]

    async def begin(self, push: int | None, *, force: bool) -> None:
        """A gateway has sent a request of this push; an operator's has none. A newer push with `force` ends
        the requests of older ones.

        Raises PushReplaced for an older push: its gateway hung while another one began the newer push.
        """
        if push is None:
            return
        if push < self._newest_push:
            raise PushReplaced(f"push {push} is older than push {self._newest_push}")
        newer, self._newest_push = push > self._newest_push, push
        if newer and force:
            for version in self.versions:
                await self.abort(version)

    async def run(self, version: int, work: Coroutine[Any, Any, T]) -> T:
        """Do the work. Raises ReloadAborted if `abort` ends it."""
        task = asyncio.create_task(work)
        self._running[task] = version
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._aborted:
                raise ReloadAborted(f"the reload of version {version} was ended") from None
            raise
        finally:
            self._running.pop(task, None)
            self._aborted.discard(task)

    async def abort(self, version: int) -> bool:
        """End the requests for this version, except one that the engine is loading. Returns whether there was
        one."""
        if self._loading() == version:
            return False
        tasks = [task for task, of in self._running.items() if of == version]
        self._aborted.update(tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return any(task.cancelled() for task in tasks)
