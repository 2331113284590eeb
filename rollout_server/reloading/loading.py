"""Has the engine load a prepared version as a transaction: it serves the whole version, or the former stays.

weights   pause ─▶ load ─▶ prove ─▶ resume        fails: kill the engine, boot the former version
adapter   load ─▶ prove, while the engine goes on
"""

import asyncio
import logging
from pathlib import Path

from rollout_queue import clock
from rollout_queue.protocol.rollout_server_messages import Joining
from rollout_server.engine.control import KV_CACHE, WEIGHTS, AdapterRefused, EngineFailed
from rollout_server.engine.engine import Engine
from rollout_server.errors import EngineUnavailable, WeightsRefused
from rollout_server.metrics import RolloutMetrics
from rollout_server.reloading.collective import NotReceived, TensorReceiver
from rollout_server.reloading.seconds import Seconds
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.policy import LocalPolicy
from rollout_server.weights.safetensors_file import BrokenWeights, weights_differ
from rollout_server.weights.store import WeightsStore

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
