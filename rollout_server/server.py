"""One rollout server put together: an engine, its weights, and the line to the gateway.

gateway ◀─▶ registration ─┐
POST /reload ─▶ reloader ─┴─▶ engine ─▶ SGLang
"""

import asyncio
import contextlib
import logging
from time import monotonic

import httpx

from rollout_queue.http.errors import ApiError
from rollout_server.engine.client import EngineClient, EngineFailed
from rollout_server.engine.command import engine_command, engine_dtype, engine_environment
from rollout_server.engine.engine import Engine, StartProcess
from rollout_server.engine.process import EngineProcess, port_in_use
from rollout_server.metrics import Metrics
from rollout_server.registration import Registration
from rollout_server.reload import Reloader, Wanted
from rollout_server.settings import Device, RolloutServerSettings
from rollout_server.weights.fetch import Fetcher, WeightsStore
from rollout_server.weights.policy import Policy
from rollout_server.weights.safetensors_file import BrokenWeights

logger = logging.getLogger(__name__)


class RolloutServer:
    """Opened and closed by the app's lifespan; everything that runs meanwhile is owned here."""

    def __init__(
        self,
        settings: RolloutServerSettings,
        control: httpx.AsyncClient,
        http: httpx.AsyncClient,
        start: StartProcess,
        *,
        float32_engine: bool,
    ) -> None:
        """`control` calls the engine, `http` everybody else; both are closed with the server."""
        self._settings = settings
        self._control = control
        self._http = http
        client = EngineClient(
            control, control_timeout_s=settings.control_timeout_s, load_timeout_s=settings.load_timeout_s
        )
        self._initial = Policy(settings.initial_version, settings.model_path.absolute())
        self.engine = Engine(settings, client, self._initial, start)
        self.metrics = Metrics(self.engine)
        self._store = WeightsStore(settings.own_weights_dir, self._initial.directory)
        fetcher = Fetcher(http, settings.trainer_url, next(iter(settings.admin_keys), None))
        self.reloader = Reloader(
            settings, self.engine, self._store, fetcher, self.metrics, float32_engine=float32_engine
        )
        self._registration = Registration(settings, http)
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Start everything; answers at once, while the engine boots."""
        self._tasks = [
            asyncio.create_task(self.engine.run(self._choose), name="engine"),
            asyncio.create_task(self._keep_registered(), name="registration"),
        ]
        for task in self._tasks:
            task.add_done_callback(_report)

    async def leave(self) -> None:
        """Drain, and let the gateway see it: this server is still there to be asked."""
        await asyncio.gather(self.engine.drain(), self._registration.announce())

    async def close(self) -> None:
        """End the engine and every task; nothing stays behind."""
        await self.engine.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._control.aclose()
        await self._http.aclose()

    @property
    def engine_url(self) -> str:
        """Where the gateway sends what is to be generated."""
        return self._settings.engine_url

    async def load_counts(self) -> tuple[int, int]:
        """Requests running and waiting in the engine; none while there is no engine to ask."""
        if self.engine.serving:
            with contextlib.suppress(EngineFailed):
                return await self.engine.client.load_counts()
        return 0, 0

    async def unready_because(self) -> str | None:
        """Why no request should come here; None when it may."""
        engine = self.engine
        if engine.state == "ready":
            return None
        if engine.serving and engine.state == "loading":
            return f"the gateway serves version {engine.awaited_version}, this server {engine.policy.version}"
        return f"the engine is {engine.state}"

    async def _choose(self, last: Policy) -> Policy:
        """What the next start boots into: the fleet's policy, else the last one if its files are whole."""
        announced = await self._registration.announce()
        self.engine.awaited_version = None
        if announced is not None and not _names(announced, last):
            try:
                return await self.reloader.prepare(announced)
            except ApiError as error:
                logger.error("version %d, which the gateway serves: %s", announced.version, error)
                self.engine.awaited_version = announced.version
        if last.manifest_sha256 is not None:
            try:
                await asyncio.to_thread(
                    self._store.verify_again, last.directory, last.version, last.manifest_sha256
                )
            except (BrokenWeights, OSError) as error:
                logger.error("version %d cannot be booted again: %s", last.version, error)
                return self._initial
        return last

    async def _keep_registered(self) -> None:
        while True:
            await asyncio.sleep(self._settings.register_every_s)
            served = self.engine.policy
            announced = await self._registration.announce()
            if announced is None and self._registration.reached:
                self.engine.awaited_version = None
            if announced is None or not self._should_adopt(announced):
                continue
            try:
                await self.reloader.reload(announced, force=True, instead_of=served)
            except ApiError as error:
                logger.error("version %d, which the gateway serves: %s", announced.version, error)

    def _should_adopt(self, announced: Wanted) -> bool:
        engine = self.engine
        if _names(announced, engine.policy):
            engine.awaited_version = None
            return False
        if announced.version > engine.policy.version or announced.version == engine.awaited_version:
            return engine.serving
        # While a push runs through the fleet, the gateway still names the version before it.
        return engine.serving and monotonic() - engine.policy_since_s > self._settings.settle_s


def build_server(settings: RolloutServerSettings, device: Device) -> RolloutServer:
    """The real thing: SGLang as a child process."""

    async def start(policy: Policy) -> EngineProcess:
        if port_in_use(settings.engine_host, settings.engine_port):
            raise EngineFailed(port_message(settings.engine_host, settings.engine_port, "engine_port"))
        command = engine_command(settings, device, policy.directory, policy.version)
        environment = engine_environment(settings, device)
        try:
            return await EngineProcess.start(command, environment, settings.log_path, settings.stop_timeout_s)
        except OSError as error:
            raise EngineFailed(f"cannot be started: {error}") from error

    return RolloutServer(
        settings,
        # The engine is on this machine: a proxy of the environment is not for it.
        httpx.AsyncClient(base_url=settings.engine_control_url, trust_env=False),
        httpx.AsyncClient(timeout=settings.fetch_timeout_s),
        start,
        float32_engine=engine_dtype(settings, device) == "float32",
    )


def port_message(host: str, port: int, field: str) -> str:
    return f"port {port} on {host} is in use: stop what listens there, or set rollout_server.{field}"


def _names(announced: Wanted, policy: Policy) -> bool:
    same_content = announced.manifest_sha256 in (None, policy.manifest_sha256)
    return announced.version == policy.version and same_content


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("%s ended by a bug", task.get_name(), exc_info=error)
