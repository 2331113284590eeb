"""The rollout server's line to the gateway: "I am here", and back: which policy the fleet serves.

server ── POST /admin/rollout_servers, every few seconds ──▶ gateway
server ◀── {"id", "policy": {"version", "location", "manifest_sha256"} | null} ── gateway
"""

import logging

import httpx
import msgspec

from rollout_server.reload import Wanted
from rollout_server.settings import RolloutServerSettings

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0


class Registered(msgspec.Struct, frozen=True):
    """The gateway's reply."""

    id: str
    policy: Wanted | None = None


class Registration:
    """Registers again and again, so that a gateway that lost its memory learns of us by itself."""

    def __init__(self, settings: RolloutServerSettings, client: httpx.AsyncClient) -> None:
        self._settings = settings
        self._client = client
        self.reached = True
        """Whether the gateway took the last registration."""

    async def announce(self) -> Wanted | None:
        """The policy that the fleet serves, if the gateway answers and there is one to fetch."""
        settings = self._settings
        if settings.gateway_url is None:
            return None
        body = {"url": settings.url, "engine_url": settings.engine_url, "id": settings.id}
        headers = {"authorization": f"Bearer {settings.admin_keys[0]}"} if settings.admin_keys else {}
        url = f"{settings.gateway_url}/admin/rollout_servers"
        try:
            response = await self._client.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
            response.raise_for_status()
            registered = msgspec.json.decode(response.content, type=Registered)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            if self.reached:  # once per outage, not once per heartbeat
                logger.warning("the gateway does not register us: %s", error or repr(error))
            self.reached = False
            return None
        if not self.reached:
            logger.info("the gateway registers us again")
        self.reached = True
        policy = registered.policy
        return policy if policy is not None and policy.location is not None else None
