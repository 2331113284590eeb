"""Keeps one SGLang engine running, also after it dies, and proves its weights.

choose policy ─▶ start ─▶ ready? ─▶ prove ─▶ serve … dies ─▶ kill its process group, wait ─┐
      └────────────────────────────────────────────────────────────────────────────────────┘

To *prove* a policy is to ask the engine for the version and the checksum of its weights, and to check both.

ready ─ withhold ─▶ paused, idle, memory released ─ load, prove (`EngineMemory`) ─▶ ready
While its memory is *withheld*, an engine that dies does not start.

LoRA adapters are loaded beside each other, each under a name of its own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Protocol

from rollout_queue import clock
from rollout_queue.machine_memory import ending
from rollout_server.engine.control import KV_CACHE, WEIGHTS, EngineControl, EngineFailed
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.locations import LocalPolicy

logger = logging.getLogger(__name__)


class ServerState(StrEnum):
    """The state of a rollout server, as `/status` gives it."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RELEASED = "released"
    """Paused, without its memory. Gateways are told that it loads, because calls have to wait as then."""
    DRAINING = "draining"
    DEAD = "dead"


class ProcessHandle(Protocol):
    """One run of the engine."""

    @property
    def exited(self) -> bool: ...
    async def wait(self) -> int: ...
    async def kill(self) -> None: ...
    async def stop(self) -> None: ...
    def log_tail(self) -> str: ...
    def note_memory(self) -> None: ...


async def how_it_ended(process: ProcessHandle) -> str:
    """How the engine's process ended, in words. The end of its log, which tells why, is logged before."""
    logger.warning("the end of the engine's log:\n%s", process.log_tail())
    return ending(await process.wait())


class EngineAdapters:
    """The adapters that calls may name, since the engine's start."""

    def __init__(self, client: EngineControl) -> None:
        self._client = client
        self._loaded: dict[str, LocalPolicy] = {}

    @property
    def loaded(self) -> Mapping[str, LocalPolicy]:
        """By their names in the engine, in the order of their loading."""
        return self._loaded

    async def load(self, policy: LocalPolicy) -> None:
        """Load the adapter of a policy, if it is one, unless the engine has it. Requests that run go on.

        Raises AdapterRefused, EngineFailed.
        """
        name = policy.adapter_name
        if name is not None and name not in await self._client.adapters():
            await self._client.load_adapter(name, str(policy.directory))

    async def prove(self, policy: LocalPolicy) -> None:
        """Check that the engine has the adapter of a policy and samples with it. It must not be paused.

        Raises EngineFailed.
        """
        name = policy.adapter_name
        if name is None:
            return
        if name not in await self._client.adapters():
            raise EngineFailed(f"the engine does not have the adapter {name}")
        await self._client.try_adapter(name)

    def note(self, policy: LocalPolicy) -> None:
        """Let calls name the adapter of a policy, if it is one: it is proved over the weights that the
        engine serves."""
        if (name := policy.adapter_name) is not None:
            self._loaded.pop(name, None)
            self._loaded[name] = policy

    def forget(self, name: str) -> None:
        """Let calls not name an adapter any more. The engine drops it when it needs the room."""
        del self._loaded[name]

    def keep_only_of(self, weights: LocalPolicy) -> None:
        """Forget the adapters of other weights: with these, they would be other models."""
        self._loaded = {name: each for name, each in self._loaded.items() if each.base == weights}

    def clear(self) -> None:
        """The engine starts again."""
        self._loaded.clear()


POLL_S = 0.2
IDLE_POLL_S = 0.1
WATCH_S = 5.0
POLLED_WITHIN_S = 1.0
"""The longest time between two polls of `/status` by one gateway."""
MAX_BACKOFF_S = 30.0
KNOWN_CHECKSUMS = 64
"""Of how many sets of weights, the last ones that were proved, the checksum is remembered."""

StartProcess = Callable[[LocalPolicy], Awaitable[ProcessHandle]]
"""Starts an engine with whole weights."""
ChoosePolicy = Callable[[LocalPolicy], Awaitable[LocalPolicy]]
"""Returns the policy of the next start, given the last one."""


class Engine:
    """One engine and the policy that it must serve, over all of its restarts."""

    def __init__(
        self,
        settings: RolloutServerSettings,
        client: EngineControl,
        initial: LocalPolicy,
        start: StartProcess,
    ) -> None:
        self.client = client
        self.policy = initial
        self.restarts = 0
        self.draining = False
        self.awaited_version: int | None = None
        """The version that the fleet serves and this server could not load; None if there is none."""
        self._settings = settings
        self._start = start
        self._phase = ServerState.STARTING
        self._changed = asyncio.Condition()
        self._process: ProcessHandle | None = None
        self._checksums: dict[LocalPolicy, str] = {}
        self.adapters = EngineAdapters(client)
        self._closing = False
        self.held = False
        """Whether an orchestrator has paused the engine: a load does not end this pause."""
        self.withheld = False
        """Whether another process has the device's memory: the engine has released it, or may not start."""

    @property
    def state(self) -> ServerState:
        if self._phase not in (ServerState.READY, ServerState.LOADING, ServerState.RELEASED):
            return self._phase
        if self.draining or self._closing:
            return ServerState.DRAINING
        return ServerState.LOADING if self.awaited_version is not None else self._phase

    @property
    def serving(self) -> bool:
        """Whether the engine runs with `policy`, also while the server drains."""
        return self._phase is ServerState.READY

    @property
    def released(self) -> bool:
        """Whether the engine runs without its memory."""
        return self._phase is ServerState.RELEASED

    async def run(self, choose: ChoosePolicy) -> None:
        """Keep an engine running until `close`."""
        backoff_s = self._settings.restart_backoff_s
        while not self._closing:
            await self.until_memory()
            await self._become(ServerState.STARTING)
            ready_at = None
            try:
                self.policy = await choose(self.policy)
                async with self._started(self.policy) as process:
                    await self._prove_boot(process)
                    ready_at = clock.monotonic()
                    await self._become(ServerState.READY)
                    await self._watch(process)
            except EngineFailed as error:
                if self._closing:
                    return
                logger.error("engine failed: %s", error)
            except Exception:  # outermost frame of a task: log the bug and start again
                logger.exception("the task of the engine failed")
            await self._become(ServerState.DEAD)
            self.restarts += 1
            if ready_at is not None and clock.monotonic() - ready_at > MAX_BACKOFF_S:
                backoff_s = self._settings.restart_backoff_s
            logger.warning("engine is dead; start %d follows in %.1f s", self.restarts + 1, backoff_s)
            await clock.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def wait_until_serving(self, timeout_s: float) -> None:
        """Raises EngineFailed when the engine does not come up in time."""
        try:
            async with clock.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.serving)
        except TimeoutError as error:
            raise EngineFailed(
                f"the engine is {self._phase} and did not come up in {timeout_s:.0f} s"
            ) from error

    async def until_memory(self) -> None:
        """Wait while the memory is withheld."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.withheld)

    async def withhold(self) -> None:
        """Free the device's memory, until `give_back`: the engine pauses, waits until it is idle, and
        releases KV cache and weights. Its requests stay queued. An engine that starts or fails is killed."""
        self.withheld = True
        if self.serving:
            try:
                async with self.swapping(ServerState.RELEASED):
                    await self._pause_idle()
                    for tag in (KV_CACHE, WEIGHTS):
                        await self.client.release(tag)
            except EngineFailed as error:
                logger.error("the engine did not release its memory: %s", error)
        elif self._process is not None and not self.released:
            await self._process.kill()
        async with self._changed:
            await self._changed.wait_for(lambda: self.released or self._process is None)

    async def give_back(self) -> None:
        """The memory is the engine's again: an engine that is dead, or that has not taken it, starts."""
        if self.released and self._process is not None:
            await self._process.kill()
        async with self._changed:
            self.withheld = False
            self._changed.notify_all()

    @asynccontextmanager
    async def swapping(self, then: ServerState = ServerState.READY) -> AsyncIterator[None]:
        """Take the server out of rotation while the block loads other weights. Afterwards it is in the state
        `then`.

        If the block fails, the engine is killed and boots into `policy`. A paused engine stays paused until
        then: no client may get tokens of weights that were not proved.
        """
        process = self._process
        if not (self.serving or self.released) or process is None:
            raise EngineFailed(f"the engine is {self._phase}")
        await self._become(ServerState.LOADING)
        try:
            yield
        except BaseException:
            logger.error("the engine is killed, and starts again with version %d", self.policy.version)
            await process.kill()
            raise
        if self._phase is ServerState.LOADING:
            await self._become(then)

    async def prove(self, policy: LocalPolicy, *, differs_from: LocalPolicy | None = None) -> None:
        """Check which weights the engine has. Raises EngineFailed if their version is not that of `policy`,
        if `policy` had another checksum before, or if their checksum is that of `differs_from`."""
        await self.prove_version(policy)
        checksum = await self.client.checksum()
        known = self._checksums.get(policy)
        if known is not None and checksum != known:
            raise EngineFailed(f"version {policy.version} has other weights in the engine than before")
        if differs_from is not None and checksum == self._checksums.get(differs_from):
            raise EngineFailed(f"the weights of version {differs_from.version} are still in the engine")
        self._checksums.pop(policy, None)
        self._checksums[policy] = checksum
        for oldest in list(self._checksums)[:-KNOWN_CHECKSUMS]:
            del self._checksums[oldest]

    async def prove_version(self, policy: LocalPolicy) -> None:
        """Check the version of the weights alone. Raises EngineFailed."""
        version = await self.client.version()
        if version != str(policy.version):
            raise EngineFailed(f"the engine serves version {version}, not {policy.version}")

    def serve(self, policy: LocalPolicy) -> None:
        """Note that the engine serves `policy` now, and boots into it when it starts again."""
        self.adapters.keep_only_of(policy.weights)
        self.adapters.note(policy)
        self.policy = policy
        self.awaited_version = None

    async def drain(self) -> None:
        """Leave rotation for good, and wait for the requests that run, at most `drain_timeout_s`.

        The engine has to be idle for POLLED_WITHIN_S, because a gateway may still send requests until it
        has polled `/status` again.
        """
        self._closing = True
        busy_at = clock.monotonic()
        deadline = busy_at + self._settings.drain_timeout_s
        while self._process is not None and clock.monotonic() < deadline:
            if await self._is_busy():
                busy_at = clock.monotonic()
            elif clock.monotonic() >= busy_at + POLLED_WITHIN_S:
                return
            await clock.sleep(POLL_S)

    async def close(self) -> None:
        """End the engine, whatever it is doing."""
        self._closing = True
        if self._process is not None:
            await self._process.stop()

    async def _is_busy(self) -> bool:
        process = self._process
        if process is None or process.exited or self._phase is ServerState.STARTING:
            return False
        if self._phase in (ServerState.LOADING, ServerState.RELEASED):
            return True  # requests wait in it, and go on with the new weights
        try:
            return (await self.client.read_load()).requests > 0
        except EngineFailed:
            return not process.exited  # an engine under load answers late

    async def _pause_idle(self) -> None:
        """Pause the engine at a moment when no request needs its memory. Raises EngineFailed after
        `control_timeout_s`."""
        began_at, longest_s = clock.monotonic(), self._settings.control_timeout_s
        await self.client.pause()
        while not await self.client.flush():
            if clock.monotonic() - began_at > longest_s:
                raise EngineFailed(f"the engine is not idle {longest_s:g} s after it was paused")
            await self.client.resume()  # for example, a grammar is never compiled while the engine is paused
            await clock.sleep(IDLE_POLL_S)
            await self.client.pause()

    @asynccontextmanager
    async def _started(self, policy: LocalPolicy) -> AsyncIterator[ProcessHandle]:
        process = self._process = await self._start(policy.weights)
        self.adapters.clear()
        self.held = False
        try:
            yield process
        finally:
            # Needed even if the engine has died: the rest of its process group would hold the port.
            await process.kill()
            self._process = None

    async def _prove_boot(self, process: ProcessHandle) -> None:
        started_at = clock.monotonic()
        while not await self.client.is_ready():
            if self.withheld:
                raise EngineFailed("ended while it started, because its memory is withheld")
            if process.exited:
                raise EngineFailed(f"while it started, it {await how_it_ended(process)}")
            if clock.monotonic() - started_at > self._settings.boot_timeout_s:
                raise EngineFailed(f"not up after {self._settings.boot_timeout_s:.0f} s")
            await clock.sleep(POLL_S)
        await self.prove(self.policy.weights)
        await self.adapters.load(self.policy)
        await self.adapters.prove(self.policy)
        self.adapters.note(self.policy)
        logger.info(
            "engine serves version %d after %.1f s", self.policy.version, clock.monotonic() - started_at
        )

    async def _watch(self, process: ProcessHandle) -> None:
        """Raises EngineFailed once the process is dead or does not answer any more."""
        alive_at = clock.monotonic()
        while True:
            process.note_memory()
            try:
                async with clock.timeout(WATCH_S):
                    await process.wait()
            except TimeoutError:
                # While weights load, the load's own timeouts apply.
                if self._phase is ServerState.LOADING or await self.client.is_alive():
                    alive_at = clock.monotonic()
                elif clock.monotonic() - alive_at > self._settings.hang_timeout_s:
                    raise EngineFailed(f"did not answer for {self._settings.hang_timeout_s:.0f} s") from None
            else:
                raise EngineFailed(f"it {await how_it_ended(process)}")

    async def _become(self, phase: ServerState) -> None:
        async with self._changed:
            self._phase = phase
            self._changed.notify_all()
