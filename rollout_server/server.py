"""One rollout server: it owns the engine, the weights on disk, and the registration with the gateway.

gateway ◀─▶ registration ─┐
POST /reload ─▶ reloader ─┼─▶ engine ─▶ SGLang
POST /memory/… ─▶ memory ─┘

EngineMemory gives the memory of the engine's device to a trainer, and takes it back, at the latest after some
time.

POST /memory/release ─▶ pause ─▶ idle ─▶ release KV cache, weights ─▶ the trainer has the memory, for `for_s`
POST /memory/resume, or `for_s` is over ─▶ take weights ─▶ load, prove ─▶ take KV cache ─▶ continue

One holder has the memory at a time. It may repeat both: a second release begins `for_s` anew, and a second
resume does nothing. So SGLang, which dies of a second one, never gets it. A trainer that starts again after a
crash is another holder: it asks until the former one's time is over. If anything fails, the engine is killed,
and starts with its policy once the trainer has given the memory back.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from rollout_queue import clock
from rollout_queue.contract.ids import new_id
from rollout_queue.http.callers import bearer
from rollout_queue.machine_memory import machine_memory
from rollout_queue.model_files import ModelFiles
from rollout_queue.private_file import write_private
from rollout_queue.protocol.rollout_server_messages import EngineLoads
from rollout_server.collective import TensorReceiver
from rollout_server.engine.command import cpu_kv_tokens, engine_command, engine_dtype, engine_environment
from rollout_server.engine.control import EngineControl, EngineFailed
from rollout_server.engine.engine import Engine, StartProcess
from rollout_server.engine.process import POLL_S as LOG_POLL_S
from rollout_server.engine.process import EngineLog, EngineProcess, port_in_use
from rollout_server.errors import MemoryRefused, ReloadError
from rollout_server.named_adapters import COMPARE_EVERY_S, NamedAdapters
from rollout_server.orchestrated import POLL_S as PAUSE_POLL_S
from rollout_server.orchestrated import OrchestratedEngine
from rollout_server.registration import Adoption, RegistrationClient
from rollout_server.reload import Reloader, ReloadRequests
from rollout_server.rollout_metrics import RolloutMetrics
from rollout_server.settings import Device, RolloutServerSettings
from rollout_server.weights.fetch import Fetcher
from rollout_server.weights.locations import LocalPolicy
from rollout_server.weights.weights_store import WeightsStore

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""How often it is checked whether a trainer's time with the memory is over."""


class EngineMemory:
    """The memory of one engine: who has it, and until when."""

    def __init__(
        self, settings: RolloutServerSettings, engine: Engine, reloader: Reloader, metrics: RolloutMetrics
    ) -> None:
        self._shared = settings.memory == "shared"
        self._engine, self._reloader, self._metrics = engine, reloader, metrics
        self._holder = ""
        self._released_at = self._until = 0.0

    async def release(self, holder: str, for_s: float) -> bool:
        """Give the memory to `holder` for this time, from now on. Returns whether it had the memory already.
        Waits while the engine loads a version. Raises MemoryRefused, also while another one's time runs."""
        if not self._shared:
            raise MemoryRefused("the engine's memory is not shared: set rollout_server.memory to shared")
        async with self._reloader.swap:
            renewed = self._engine.withheld
            if renewed and holder != self._holder and not self._is_over():
                left_s = self._until - clock.monotonic()
                raise MemoryRefused(
                    f"{self._holder} has the engine's memory for {left_s:.0f} s more, or until it asks again "
                    "or gives it back; POST /memory/resume without a holder takes it back now"
                )
            self._holder, self._until = holder, clock.monotonic() + for_s
            if not renewed:
                self._released_at = clock.monotonic()
                await self._engine.withhold()
                self._until = clock.monotonic() + for_s
                logger.info("%s has the engine's memory, for %g s", holder, for_s)
            return renewed

    async def resume(self, holder: str | None) -> None:
        """Take the memory back, if it is given away. Raises MemoryRefused if another than `holder` has it;
        None takes it from anyone."""
        async with self._reloader.swap:
            if not self._engine.withheld:
                return
            if holder not in (None, self._holder):
                raise MemoryRefused(f"{self._holder} has the engine's memory, not {holder}")
            await self._take_back()

    async def keep_time(self) -> None:
        """Take the memory back if its time is over."""
        if not self._is_over():
            return
        async with self._reloader.swap:
            if self._is_over():
                logger.warning("%s did not give the engine's memory back in its time", self._holder)
                await self._take_back()

    def _is_over(self) -> bool:
        return self._engine.withheld and clock.monotonic() >= self._until

    async def _take_back(self) -> None:
        try:
            if self._engine.released:
                await self._reloader.reoccupy()
        except ReloadError as error:
            logger.error("the engine did not take its memory again, and starts again: %s", error)
        finally:
            await self._engine.give_back()
            self._metrics.released(clock.monotonic() - self._released_at)


MODEL = "model"
"""The directory of links to the model's files, if the model's own has others that the engine would read."""


class RolloutServer:
    """The app's lifespan opens and closes it. It owns every task and client that runs meanwhile."""

    def __init__(
        self,
        settings: RolloutServerSettings,
        control: httpx.AsyncClient,
        http: httpx.AsyncClient,
        start: StartProcess,
        weights_dir: Path,
        *,
        float32_engine: bool,
    ) -> None:
        """`control` calls the engine, `http` the gateway and sources of weights. `close` closes both.

        No other server may use `weights_dir`. Raises BrokenWeights and OSError for a model that cannot be
        served.
        """
        self._settings = settings
        self._control = control
        self._http = http
        client = EngineControl(
            control, control_timeout_s=settings.control_timeout_s, load_timeout_s=settings.load_timeout_s
        )
        model = ModelFiles.read(settings.model_path.absolute())
        directory = model.linked(weights_dir / MODEL) if model.ambiguous else model.directory
        self._initial = LocalPolicy(settings.initial_version, directory)
        self.engine = Engine(settings, client, self._initial, start)
        self.metrics = RolloutMetrics(self.engine)
        self.store = WeightsStore(weights_dir, model.directory, settings.lora)
        own_key = settings.presented_key
        fetcher = Fetcher(
            http, settings.trainer_url, own_key, settings.object_store, settings.fetch_timeout_s
        )
        receiver = TensorReceiver(
            http,
            client,
            settings.trainer_url,
            own_key,
            timeout_s=settings.collective_timeout_s,
            rest_s=settings.collective_rest_s,
        )
        for check in self.store.expected.checks:
            logger.info("%s", check.line)
        self.reloader = Reloader(
            settings, self.engine, self.store, fetcher, receiver, self.metrics, float32_engine=float32_engine
        )
        self.memory = EngineMemory(settings, self.engine, self.reloader, self.metrics)
        self.reloads = ReloadRequests(lambda: self.reloader.loading)
        self._adoption = Adoption(settings, self.engine, self.reloader, self.reloads)
        self.adapters = NamedAdapters(settings, self.engine, self.reloader, self.store)
        self.orchestrated = OrchestratedEngine(settings, self.engine, self.reloader, self.reloads, http)
        self.process = new_id()
        """Tells this process from any other that has the same id or URL."""
        copy = sys.stdout.buffer if settings.engine_log_to_stdout else None
        self._engine_log = EngineLog(settings.log_path, settings.engine_log_bytes, copy)
        self._registration = RegistrationClient(settings, http, self.process)
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Start the engine and the registration. Returns at once, while the engine boots."""
        repeated = (
            (self._keep_registered, self._settings.register_every_s),
            (self.adapters.keep, COMPARE_EVERY_S),
            (self.memory.keep_time, POLL_S),
            (self.orchestrated.keep_time, PAUSE_POLL_S),
            (self._engine_log.keep, LOG_POLL_S),
        )
        self._tasks = [asyncio.create_task(self.engine.run(self._choose), name="engine")]
        self._tasks += [asyncio.create_task(_repeat(work, every_s)) for work, every_s in repeated]

    async def leave(self) -> None:
        """Drain the engine, while `/status` still tells the gateways that this server drains."""
        await asyncio.gather(self.engine.drain(), self._registration.announce())

    async def close(self) -> None:
        """End the engine and every task."""
        await self.engine.close()
        await self._adoption.close()
        await self.reloader.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine_log.keep()
        await self._control.aclose()
        await self._http.aclose()

    @property
    def engine_url(self) -> str:
        """Where the gateway sends generation requests."""
        return self._registration.addresses.engine_url

    @property
    def public_url(self) -> str | None:
        """Where others reach this server, if the settings say so."""
        return self._settings.public_url

    @property
    def name(self) -> str:
        """The id in the fleet."""
        return self._settings.name

    async def load(self) -> EngineLoads:
        """What the engine says of its load; nothing while no engine serves."""
        if self.engine.serving:
            with contextlib.suppress(EngineFailed):
                return await self.engine.client.read_load()
        return EngineLoads()

    async def unready_because(self) -> str | None:
        """Why this server is not in rotation; None when it is."""
        engine = self.engine
        if self._registration.refusal is not None:
            return f"the gateway refuses this server: {self._registration.refusal}"
        if engine.state == "ready":
            return None
        if engine.serving and engine.state == "loading":
            return f"the gateway serves version {engine.awaited_version}, this server {engine.policy.version}"
        if engine.withheld:
            return "the trainer has the engine's memory"
        return f"the engine is {engine.state}"

    async def _choose(self, last: LocalPolicy) -> LocalPolicy:
        """The policy of the next start. It is the fleet's policy, or the last one if the fleet's is unknown
        or cannot be loaded. If the files of the last one have changed, it is an earlier one."""
        announced = await self._registration.announce()
        self.engine.awaited_version = None
        if announced is not None and not announced.is_same_as(last):
            try:
                return await self.reloader.prepare(announced)
            except ReloadError as error:
                logger.error(
                    "version %d, which the gateway serves, was not loaded: %s", announced.version, error
                )
                self.engine.awaited_version = announced.version
        return await self.reloader.restore(last)

    async def _keep_registered(self) -> None:
        served = self.engine.policy
        announced = await self._registration.announce()
        self.adapters.want(self._registration.adapters)
        if announced is None and self._registration.reached:
            self.engine.awaited_version = None
        if announced is not None:
            self._adoption.consider(announced, served)


def build_server(settings: RolloutServerSettings, device: Device, weights_dir: Path) -> RolloutServer:
    """A server whose engine is SGLang, as a child process."""

    async def start(policy: LocalPolicy) -> EngineProcess:
        if port_in_use(settings.engine_host, settings.engine_port):
            raise EngineFailed(port_message(settings.engine_host, settings.engine_port, "engine_port"))
        if settings.engine_key is not None:
            write_private(settings.engine_key_path, settings.engine_key)
        environment = engine_environment(settings, device)
        try:
            kv_tokens = cpu_kv_tokens(settings, policy.directory, machine_memory().free)
            command = engine_command(settings, device, policy.directory, policy.version, kv_tokens)
            return await EngineProcess.start(command, environment, settings.log_path, settings.stop_timeout_s)
        except OSError as error:
            raise EngineFailed(f"cannot be started: {error}") from error

    return RolloutServer(
        settings,
        # The engine is on this machine, so the environment's proxy settings do not apply.
        httpx.AsyncClient(
            base_url=settings.engine_control_url, headers=bearer(settings.engine_key), trust_env=False
        ),
        httpx.AsyncClient(timeout=settings.fetch_timeout_s),
        start,
        weights_dir,
        float32_engine=engine_dtype(settings, device) == "float32",
    )


def port_message(host: str, port: int, field: str) -> str:
    return f"port {port} on {host} is in use: stop what listens there, or set rollout_server.{field}"


async def _repeat(work: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Do the work again and again; a failure does not end it."""
    while True:
        await clock.sleep(every_s)
        try:
            await work()
        except Exception:  # outermost frame of a task: log the bug and go on
            logger.exception("the background task %s failed", getattr(work, "__name__", work))
