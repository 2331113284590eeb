"""Registers this server with the gateway, and learns from the answer which policy the fleet serves.

server ── POST /admin/rollout_servers, every few seconds ──▶ gateway
server ◀── the policy that the fleet serves, or null ── gateway

The gateway reaches this server and its engine at their URLs. If `public_url` or `engine_public_url` is set,
it is the URL. Otherwise the URL has the host on which the port is bound. For a port that is bound on all
addresses (0.0.0.0), it has the address from which this machine reaches the gateway.

Adoption loads the fleet's policy without a push, if the gateway goes on naming another policy than the one
served.

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
from typing import NamedTuple

import httpx
from pydantic import ValidationError

from rollout_queue import clock
from rollout_queue.http.callers import bearer
from rollout_queue.http.http_server import LOOPBACK_ADDRESS, WILDCARDS, address_towards, http_url
from rollout_queue.protocol.gateway_messages import Registered, ServerBody
from rollout_queue.protocol.message import MalformedMessage, error_message, first_fault
from rollout_queue.protocol.rollout_server_messages import WantedAdapters
from rollout_server.engine.engine import Engine
from rollout_server.errors import ReloadError, WeightsRefused
from rollout_server.reload import Reloader, ReloadRequests
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.locations import LocalPolicy, WantedPolicy

logger = logging.getLogger(__name__)


class Addresses(NamedTuple):
    """The URLs of the server and of its engine."""

    url: str
    engine_url: str


def addresses(settings: RolloutServerSettings) -> Addresses:
    """May look up the gateway's name, which can take seconds. Raises OSError if that fails."""
    wildcard = LOOPBACK_ADDRESS
    bound = [(settings.public_url, settings.host), (settings.engine_public_url, settings.engine_host)]
    if settings.gateway_url and any(url is None and host in WILDCARDS for url, host in bound):
        wildcard = address_towards(settings.gateway_url)
    return Addresses(
        settings.public_url or http_url(settings.host, settings.port, wildcard),
        settings.engine_public_url or http_url(settings.engine_host, settings.engine_port, wildcard),
    )


TIMEOUT_S = 10.0
FORGET_AFTER_S = 600.0
"""How long the gateway remembers a dead server whose id comes from its host name. A new container has another
host name, so the former id would otherwise stay for ever."""


class RegistrationRefused(Exception):
    """Another server has this server's id or URL."""


class RegistrationClient:
    """Registers again and again, because a gateway may have lost its registrations."""

    def __init__(self, settings: RolloutServerSettings, client: httpx.AsyncClient, process: str) -> None:
        self._settings = settings
        self._client = client
        self._process = process
        self.reached = True
        """Whether the gateway accepted the last registration."""
        self.refusal: str | None = None
        """Why the gateway refused the last registration; None if it did not."""
        self.adapters: WantedAdapters | None = None
        """The adapters that the gateway wanted at the last registration, beside the policy."""
        self.addresses = addresses(settings.model_copy(update={"gateway_url": None}))
        """The URLs of the last registration. Before the first one, the URLs for callers on this machine."""

    async def announce(self) -> WantedPolicy | None:
        """Register once. Returns the policy that the fleet serves; None if the gateway does not answer, or
        names no policy with a location."""
        if self._settings.gateway_url is None:
            return None
        try:
            registered = await self._register(f"{self._settings.gateway_url}/admin/rollout_servers")
        except RegistrationRefused as error:
            if self.refusal != str(error):  # once per reason, not once per registration
                logger.error("the gateway refuses this server: %s", error)
            self.refusal, self.reached = str(error), False
            return None
        except (httpx.HTTPError, OSError, ValidationError, MalformedMessage) as error:
            if self.reached:  # once per outage, not once per registration
                reason = first_fault(error) if isinstance(error, ValidationError) else str(error)
                logger.warning("the gateway does not register this server: %s", reason or repr(error))
            self.reached = False
            return None
        if not self.reached:
            logger.info("the gateway registers this server again")
        self.reached, self.refusal = True, None
        self.adapters, policy = registered.adapters, registered.policy
        if policy is None or policy.location is None:
            return None
        return WantedPolicy(policy.version, policy.location, policy.manifest_sha256)

    async def _register(self, url: str) -> Registered:
        settings = self._settings
        self.addresses = await asyncio.to_thread(addresses, settings)
        body = ServerBody(
            url=self.addresses.url,
            engine_url=self.addresses.engine_url,
            id=settings.name,
            process=self._process,
            forget_after_s=FORGET_AFTER_S if settings.id is None else None,
        )
        headers = bearer(settings.presented_key)
        response = await self._client.post(url, json=body.model_dump(), headers=headers, timeout=TIMEOUT_S)
        if response.status_code == httpx.codes.CONFLICT:
            raise RegistrationRefused(error_message(response.content))
        return Registered.read(response.raise_for_status().content)


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
