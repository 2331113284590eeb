"""Keeps one SGLang engine alive and right: starts it, watches it, starts it again when it dies.

choose policy ─▶ start ─▶ ready? ─▶ prove ─▶ serve … dies ─▶ kill the group, back off ─┐
      └────────────────────────────────────────────────────────────────────────────────┘
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Protocol

from rollout_server.engine.client import EngineClient, EngineFailed
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.policy import Policy, State

logger = logging.getLogger(__name__)

POLL_S = 0.2
WATCH_S = 5.0
HEARD_WITHIN_S = 1.0
"""So soon every gateway has asked how this server is."""
MAX_BACKOFF_S = 30.0


class Process(Protocol):
    """What the keeper needs of an operating-system process."""

    @property
    def exited(self) -> bool: ...
    async def wait(self) -> int: ...
    async def kill(self) -> None: ...
    async def stop(self) -> None: ...
    def last_words(self) -> str: ...


StartProcess = Callable[[Policy], Awaitable[Process]]
ChoosePolicy = Callable[[Policy], Awaitable[Policy]]
"""From what was served last to what the next start serves; never raises."""


class Engine:
    """One engine and the policy that it must serve, over all of its restarts."""

    def __init__(
        self, settings: RolloutServerSettings, client: EngineClient, initial: Policy, start: StartProcess
    ) -> None:
        self.client = client
        self.policy = initial
        self.restarts = 0
        self.draining = False
        self.awaited_version: int | None = None
        """What the gateway wants served while this server could not fetch it yet."""
        self.policy_since_s = monotonic()
        self._settings = settings
        self._start = start
        self._phase = State.STARTING
        self._changed = asyncio.Condition()
        self._process: Process | None = None
        self._checksums: dict[Policy, str] = {}
        self._closing = False

    @property
    def state(self) -> State:
        if self._phase not in (State.READY, State.LOADING):
            return self._phase
        if self.draining or self._closing:
            return State.DRAINING
        return State.LOADING if self.awaited_version is not None else self._phase

    @property
    def serving(self) -> bool:
        """The engine answers with `policy`, whether or not it is in rotation."""
        return self._phase is State.READY

    async def run(self, choose: ChoosePolicy) -> None:
        """Keep an engine running until `close`."""
        backoff_s = self._settings.restart_backoff_s
        while not self._closing:
            await self._become(State.STARTING)
            self.policy = await choose(self.policy)
            ready_at_s = None
            try:
                async with self._started(self.policy) as process:
                    await self._prove_boot(process)
                    ready_at_s = monotonic()
                    await self._become(State.READY)
                    await self._watch(process)
            except EngineFailed as error:
                if self._closing:
                    return
                logger.error("engine failed: %s", error)
            await self._become(State.DEAD)
            self.restarts += 1
            if ready_at_s is not None and monotonic() - ready_at_s > MAX_BACKOFF_S:
                backoff_s = self._settings.restart_backoff_s
            logger.warning("engine is dead; start %d follows in %.1f s", self.restarts + 1, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def wait_until_serving(self, timeout_s: float) -> None:
        """Raises EngineFailed when the engine does not come up in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.serving)
        except TimeoutError as error:
            raise EngineFailed(
                f"the engine is {self._phase} and did not come up in {timeout_s:.0f} s"
            ) from error

    @asynccontextmanager
    async def swapping(self) -> AsyncIterator[None]:
        """Out of rotation while the block runs. If it fails, the engine is killed and boots into `policy`.

        It stays paused until then: what an untrusted engine samples must not reach anybody.
        """
        process = self._process
        if not self.serving or process is None:
            raise EngineFailed(f"the engine is {self._phase}")
        await self._become(State.LOADING)
        try:
            yield
        except BaseException:
            await process.kill()
            raise
        if self._phase is State.LOADING:
            await self._become(State.READY)

    async def prove(self, policy: Policy, *, differs_from: Policy | None = None) -> None:
        """Raises EngineFailed unless the engine says and shows that it serves `policy`."""
        version = await self.client.version()
        if version != str(policy.version):
            raise EngineFailed(f"the engine serves version {version}, not {policy.version}")
        checksum = await self.client.checksum()
        known = self._checksums.get(policy)
        if known is not None and checksum != known:
            raise EngineFailed(f"version {policy.version} has other weights in the engine than before")
        if differs_from is not None and checksum == self._checksums.get(differs_from):
            raise EngineFailed(f"the weights of version {differs_from.version} are still in the engine")
        self._checksums[policy] = checksum

    def serve(self, policy: Policy) -> None:
        """From now on this is what the engine serves and boots into."""
        self.policy = policy
        self.policy_since_s = monotonic()
        self.awaited_version = None

    async def drain(self) -> None:
        """Out of rotation for good; what runs may end, for a while, and what gateways send that have not
        heard of it yet."""
        self._closing = True
        busy_s = monotonic()
        until_s = busy_s + self._settings.drain_timeout_s
        while self._process is not None and monotonic() < min(busy_s + HEARD_WITHIN_S, until_s):
            if await self._is_busy():
                busy_s = monotonic()
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """End the engine, whatever it does."""
        self._closing = True
        if self._process is not None:
            await self._process.stop()

    async def _is_busy(self) -> bool:
        process = self._process
        if process is None or process.exited or self._phase is State.STARTING:
            return False
        if self._phase is State.LOADING:
            return True  # calls wait in it, and go on with the weights that come
        try:
            return sum(await self.client.load_counts()) > 0
        except EngineFailed:
            return not process.exited  # one that has much to do answers late

    @asynccontextmanager
    async def _started(self, policy: Policy) -> AsyncIterator[Process]:
        process = self._process = await self._start(policy)
        try:
            yield process
        finally:
            # Also after its own death: what is left of its group would hold the port.
            await process.kill()
            self._process = None

    async def _prove_boot(self, process: Process) -> None:
        started_s = monotonic()
        while not await self.client.is_ready():
            if process.exited:
                raise EngineFailed(f"died while it started:\n{process.last_words()}")
            if monotonic() - started_s > self._settings.boot_timeout_s:
                raise EngineFailed(f"not up after {self._settings.boot_timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)
        await self.prove(self.policy)
        logger.info("engine serves version %d after %.1f s", self.policy.version, monotonic() - started_s)

    async def _watch(self, process: Process) -> None:
        """Returns by raising, once the process is dead or answers no more."""
        alive_s = monotonic()
        while True:
            try:
                code = await asyncio.wait_for(process.wait(), WATCH_S)
            except TimeoutError:
                # While weights load, the calls' own timeouts watch.
                if self._phase is State.LOADING or await self.client.is_alive():
                    alive_s = monotonic()
                elif monotonic() - alive_s > self._settings.hang_timeout_s:
                    raise EngineFailed(f"silent for {self._settings.hang_timeout_s:.0f} s") from None
            else:
                raise EngineFailed(f"exited with {code}:\n{process.last_words()}")

    async def _become(self, phase: State) -> None:
        async with self._changed:
            self._phase = phase
            self._changed.notify_all()
