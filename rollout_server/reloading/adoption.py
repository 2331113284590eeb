"""Loads the fleet's policy without a push, if the gateway goes on naming another policy than the one served.

registration ─▶ another policy is named, for `settle_s` ─▶ prefetch ─▶ reload
                        ▲                                     ├─ refused as broken: not again
                        └─ after a pause that doubles ────────┴─ failed

The gateway pushes its version to every live server, in an order that spares the sources and the fleet's
capacity. So a server that serves waits for the push. A server that could not start with the fleet's policy
begins at once.
"""

import asyncio
import logging
import math

from rollout_queue import clock
from rollout_server.engine.engine import Engine
from rollout_server.errors import ReloadError, WeightsRefused
from rollout_server.reloading.reload import Reloader
from rollout_server.reloading.requests import ReloadRequests
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.policy import LocalPolicy, WantedPolicy

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0


class Adoption:
    """What the gateway names, for how long it has named it, and the reload that follows."""

    def __init__(
        self, settings: RolloutServerSettings, engine: Engine, reloader: Reloader, reloads: ReloadRequests
    ) -> None:
        self._settle_s, self._first_pause_s = settings.settle_s, settings.register_every_s
        self._engine, self._reloader, self._reloads = engine, reloader, reloads
        self._named: tuple[WantedPolicy, LocalPolicy] | None = None
        """What the gateway names, and what is served instead."""
        self._since = 0.0
        """When the gateway named it first, or when the last attempt failed."""
        self._pause_s = 0.0
        """The pause after the last attempt; 0 before the first one."""
        self._task: asyncio.Task[None] | None = None

    def consider(self, named: WantedPolicy, served: LocalPolicy) -> None:
        """The gateway names a policy, and `served` was served when it was asked. Begins a reload if one is
        due."""
        engine = self._engine
        if named.is_same_as(engine.policy):
            engine.awaited_version = None
            self._named = None
            return
        if self._named != (named, served):
            self._named, self._since, self._pause_s = (named, served), clock.monotonic(), 0.0
        settle_s = 0.0 if named.version == engine.awaited_version else self._settle_s
        due = clock.monotonic() - self._since >= (self._pause_s or settle_s)
        if due and engine.serving and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._adopt(named, served), name="adoption")

    async def close(self) -> None:
        """End the reload that runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _adopt(self, named: WantedPolicy, served: LocalPolicy) -> None:
        try:
            await self._reloads.run(named.version, self._load(named, served))
        except ReloadError as error:
            logger.error("version %d, which the gateway serves, was not loaded: %s", named.version, error)
            again = not (isinstance(error, WeightsRefused) and named.manifest_sha256 is not None)
        except Exception:  # outermost frame of a task: log the bug and go on
            logger.exception("version %d, which the gateway serves, was not loaded", named.version)
            again = True
        else:
            return
        if self._named == (named, served):
            pause_s = min(2 * (self._pause_s or self._first_pause_s), LONGEST_PAUSE_S)
            self._since, self._pause_s = clock.monotonic(), pause_s if again else math.inf

    async def _load(self, named: WantedPolicy, served: LocalPolicy) -> None:
        await self._reloader.prefetch(named)  # first: a reload lets nothing else have the engine's memory
        await self._reloader.reload(named, force=True, instead_of=served)
