"""Registers this server with the gateway, and learns from the answer which policy the fleet serves.

server ── POST /admin/rollout_servers, every few seconds ──▶ gateway
server ◀── the policy that the fleet serves, or null ── gateway
"""

import asyncio
import logging

import httpx
from pydantic import ValidationError

from rollout_queue.http.callers import bearer
from rollout_queue.protocol.gateway_messages import Registered, ServerBody
from rollout_queue.protocol.message import MalformedMessage, error_message, first_fault
from rollout_queue.protocol.rollout_server_messages import WantedAdapters
from rollout_server.addresses import addresses
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.policy import WantedPolicy

logger = logging.getLogger(__name__)

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
