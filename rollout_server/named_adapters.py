"""Keeps the adapters in the engine that are policies of their own, as the gateway wants them.

registration, POST /adapters ─▶ wanted ─▶ fetch, verify ─▶ load ─▶ prove
                                  └─ not wanted any more ─▶ forgotten, its files removed

The engine keeps an adapter that is forgotten until it needs the room: to unload it would hold up every load
of another adapter until the last call of this one has ended.
"""

import asyncio
import logging
from collections.abc import Mapping

from rollout_queue import clock
from rollout_queue.protocol.rollout_server_messages import LoadedAdapter, WantedAdapter, WantedAdapters
from rollout_server.engine.control import AdapterRefused, EngineFailed
from rollout_server.engine.engine import Engine
from rollout_server.errors import (
    LocationRefused,
    ReloadError,
    VersionRefused,
    WeightsRefused,
    WeightsUnavailable,
)
from rollout_server.reload import Reloader
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.locations import LocalPolicy, WantedPolicy
from rollout_server.weights.weights_store import WeightsStore

logger = logging.getLogger(__name__)

Key = tuple[str, int]
COMPARE_EVERY_S = 1.0
"""How often the engine is compared with what is wanted: it may have started again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""The pause before a failed load is repeated; it doubles with each."""


class NamedAdapters:
    """The adapters that have a name. `keep` runs every COMPARE_EVERY_S."""

    def __init__(
        self, settings: RolloutServerSettings, engine: Engine, reloader: Reloader, store: WeightsStore
    ) -> None:
        self._engine, self._reloader, self._store = engine, reloader, store
        self._timeout_s = settings.adapter_timeout_s
        self._wanted: Mapping[Key, WantedAdapter] | None = None
        self._revision = 0
        self._loading = asyncio.Lock()
        self._failures: dict[Key, tuple[int, float, str, bool]] = {}
        """How often a load has failed, when the next one may begin, why the last one failed, and whether the
        adapter itself was refused."""
        self._preparing: tuple[WantedAdapter, asyncio.Timeout] | None = None
        """The adapter that is fetched and verified now, and the bound of its time."""

    def want(self, wanted: WantedAdapters | None) -> None:
        """From now on, have these adapters. An older list than the last one is ignored. Ends the preparation
        of an adapter that is not wanted any more."""
        if wanted is None or wanted.revision < self._revision:
            return
        self._revision = wanted.revision
        self._wanted = {(each.policy, each.version): each for each in wanted.adapters}
        self._failures = {key: each for key, each in self._failures.items() if key in self._wanted}
        if self._preparing is not None:
            adapter, bound = self._preparing
            if not self._wants(adapter) and not bound.expired():
                bound.reschedule(0.0)  # a moment that has passed

    async def keep(self) -> None:
        """Load what is missing, and forget what is not wanted."""
        if self._wanted is not None and self._engine.serving:
            await self.settle(again=False)

    async def settle(self, *, again: bool = True) -> tuple[LoadedAdapter, ...]:
        """Load what is missing now, and forget the others. With `again`, what has failed is tried at once."""
        async with self._loading:
            wanted = self._wanted or {}
            results = [await self._settled(each, again=again) for each in wanted.values()]
            self._forget_others()
            return tuple(results)

    def _forget_others(self) -> None:
        """Forget the adapters that are not wanted, and remove their files."""
        wanted = self._wanted or {}
        for engine_name, policy in list(self._engine.adapters.loaded.items()):
            if policy.name is not None and (policy.name, policy.version) not in wanted:
                self._engine.adapters.forget(engine_name)
        self._store.keep_only_named({each.directory for each in self._engine.adapters.loaded.values()})

    async def _settled(self, adapter: WantedAdapter, *, again: bool) -> LoadedAdapter:
        """Load one adapter, unless the engine has it."""
        key = adapter.policy, adapter.version
        failures, next_at, error, refused = self._failures.get(key, (0, 0.0, "", False))
        due = self._wants(adapter) and (again or clock.monotonic() >= next_at)
        if due and not self._has(adapter):
            try:
                await self._load(adapter)
            except (ReloadError, EngineFailed) as failure:
                error, refused = str(failure), _is_refusal(failure)
                pause_s = min(FIRST_PAUSE_S * 2.0**failures, LONGEST_PAUSE_S)
                if self._wants(adapter):
                    self._failures[key] = (failures + 1, clock.monotonic() + pause_s, error, refused)
                logger.error("the adapter %s@%d is not loaded: %s", *key, error)
            else:
                self._failures.pop(key, None)
                logger.info("the adapter %s@%d is loaded", *key)
        has = self._has(adapter)
        return LoadedAdapter(
            policy=key[0],
            version=key[1],
            ok=has,
            error=None if has else error,
            refused=refused and not has,
        )

    async def _load(self, adapter: WantedAdapter) -> None:
        """Raises ReloadError, EngineFailed."""
        self._check_engine()  # before anything is fetched
        policy = await self._prepare(adapter)
        self._check_engine()
        await self._engine.adapters.load(policy)
        await self._engine.adapters.prove(policy)
        self._check_engine()  # a push may have replaced the weights meanwhile
        self._engine.adapters.note(policy)

    async def _prepare(self, adapter: WantedAdapter) -> LocalPolicy:
        """Fetch and verify the files. Raises ReloadError."""
        wanted = WantedPolicy(adapter.version, adapter.location, adapter.manifest_sha256, name=adapter.policy)
        try:
            async with clock.timeout(self._timeout_s) as bound:
                self._preparing = adapter, bound
                return await self._reloader.prepare(wanted)
        except TimeoutError as error:
            late = f"was not here and verified within {self._timeout_s:g} s"
            raise WeightsUnavailable(late if self._wants(adapter) else "is not wanted any more") from error
        finally:
            self._preparing = None

    def _wants(self, adapter: WantedAdapter) -> bool:
        return self._wanted is not None and adapter in self._wanted.values()

    def _check_engine(self) -> None:
        if not self._engine.serving:
            raise EngineFailed("the engine does not run")
        if self._engine.held:
            raise EngineFailed("the engine is paused")
        if self._engine.policy.weights.manifest_sha256 is not None:  # published weights are no adapter's base
            raise AdapterRefused("the engine serves other weights than those that the adapter belongs to")

    def _has(self, adapter: WantedAdapter) -> bool:
        return any(_is(policy, adapter) for policy in self._engine.adapters.loaded.values())


def _is_refusal(failure: ReloadError | EngineFailed) -> bool:
    """Whether the adapter itself is at fault, and not the way to it, or the engine."""
    return isinstance(failure, AdapterRefused | LocationRefused | VersionRefused | WeightsRefused)


def _is(policy: LocalPolicy, adapter: WantedAdapter) -> bool:
    digest = adapter.manifest_sha256
    same = digest is None or digest.lower() == policy.manifest_sha256
    return (policy.name, policy.version) == (adapter.policy, adapter.version) and same
