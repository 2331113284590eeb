"""Has the engine load a prepared version as a transaction: it serves the whole version, or the former stays.

weights   pause ─▶ load ─▶ prove ─▶ resume        fails: kill the engine, boot the former version
adapter   load ─▶ prove, while the engine goes on
"""

import asyncio
import logging
from pathlib import Path
from time import monotonic

import msgspec

from rollout_server.engine.control import KV_CACHE, WEIGHTS, AdapterRefused, EngineFailed
from rollout_server.engine.engine import Engine
from rollout_server.errors import EngineUnavailable, WeightsRefused
from rollout_server.metrics import RolloutMetrics
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.policy import LocalPolicy
from rollout_server.weights.safetensors_file import weights_differ
from rollout_server.weights.store import WeightsStore

logger = logging.getLogger(__name__)


class Seconds(msgspec.Struct):
    """How long the parts of a reload took."""

    fetch: float = 0.0
    verify: float = 0.0
    load: float = 0.0
    paused: float = 0.0


class EngineLoader:
    """Loads one version at a time; the caller sees to that."""

    def __init__(
        self,
        settings: RolloutServerSettings,
        engine: Engine,
        store: WeightsStore,
        metrics: RolloutMetrics,
        *,
        float32_engine: bool,
    ) -> None:
        self._settings, self._engine, self._store, self._metrics = settings, engine, store, metrics
        self._float32_engine = float32_engine
        self.loading: int | None = None
        """The version that the engine loads now."""

    async def load(self, policy: LocalPolicy, seconds: Seconds) -> None:
        """Serve the version. Raises EngineUnavailable, and WeightsRefused if the engine refuses an adapter:
        the former version stays then."""
        former = self._engine.policy
        self.loading = policy.version
        try:
            if policy.weights == former.weights and not self._engine.released:
                await self._load_adapter(policy, seconds)
            else:
                await self._load_weights(policy, seconds)
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
        self._metrics.loaded(seconds.fetch + seconds.verify + seconds.load, seconds.paused)
        if policy == former:
            logger.info("version %d is loaded again: %.3f s", policy.version, seconds.paused)
            return
        self._store.keep_only({policy.directory, former.directory, *self._adapters_to_keep()})
        logger.info("version %d replaces %d: paused %.3f s", policy.version, former.version, seconds.paused)

    async def _load_weights(self, policy: LocalPolicy, seconds: Seconds) -> None:
        """Load the weights of the version, and then its adapter, if it is one."""
        engine, client, weights = self._engine, self._engine.client, policy.weights
        former, released = engine.policy.weights, engine.released
        other = weights != former and await asyncio.to_thread(
            weights_differ, weights.directory, former.directory, float32_engine=self._float32_engine
        )
        async with engine.swapping():
            paused_at = monotonic()
            if released:  # it is paused, and its weights come back without their content
                await client.reoccupy(WEIGHTS)
            else:
                # A request that goes on with an adapter, over other weights, would be of neither version.
                await client.pause(abort=bool(engine.adapters.loaded))
            load_at = monotonic()
            await client.load(str(weights.directory), weights.version)
            await engine.prove(weights, differs_from=former if other else None)
            await engine.adapters.load(policy)
            seconds.load = monotonic() - load_at
            if released:
                await client.reoccupy(KV_CACHE)
            await client.resume()
            seconds.paused = monotonic() - paused_at
            await engine.adapters.prove(policy)
            engine.serve(policy)

    async def _load_adapter(self, policy: LocalPolicy, seconds: Seconds) -> None:
        """Serve an adapter, or its base without one. Nothing pauses: what runs goes on as it began."""
        load_at = monotonic()
        await self._engine.prove_version(policy.weights)
        await self._engine.adapters.load(policy)
        await self._engine.adapters.prove(policy)
        seconds.load = monotonic() - load_at
        self._engine.serve(policy)

    def _adapters_to_keep(self) -> list[Path]:
        """The directories of the last adapters: the engine reads one again that it has dropped, and calls may
        name it."""
        lora, adapters = self._settings.lora, self._engine.adapters
        own = [engine_name for engine_name, each in adapters.loaded.items() if each.name is None]
        for engine_name in own[: -lora.max_loaded if lora else None]:
            adapters.forget(engine_name)
        return [each.directory for each in adapters.loaded.values()]
