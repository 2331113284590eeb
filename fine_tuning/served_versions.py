"""What the gateway says of the policy: its name, the version that is served, and the versions there are."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import msgspec

from environments.session_client import pause_after
from rollout_queue import clock
from rollout_queue.foreign_json import read_json
from rollout_queue.protocol.gateway_messages import PolicyPage, PolicyVersion, SystemStatus
from rollout_queue.protocol.message import MalformedMessage, error_message

logger = logging.getLogger(__name__)

T = TypeVar("T", PolicyPage, SystemStatus)
Answer = TypeVar("Answer")
TIMEOUT_S = 30.0
LATER = (408, 429)
"""With these, and with those from 500 on, the gateway may answer later."""


class GatewaySilent(Exception):
    """The gateway did not answer, or refused."""


class GatewayRefused(GatewaySilent):
    """It refused, or its answer cannot be read: so it will be again."""


async def answered(
    ask: Callable[[], Awaitable[Answer]], waits_s: float, tell: Callable[[str], None]
) -> Answer:
    """Ask again and again while the gateway is away, for `waits_s` seconds. `tell` gets a sentence when the
    waiting begins. Raises GatewayRefused at once, and GatewaySilent in the end."""
    deadline = clock.monotonic() + waits_s
    for attempt in range(1_000_000):
        try:
            return await ask()
        except GatewayRefused:
            raise
        except GatewaySilent as error:
            pause_s = pause_after(attempt)
            if clock.monotonic() + pause_s > deadline:
                raise
            if not attempt:
                tell(f"The job waits for the gateway: {error}")
        await clock.sleep(pause_s)
    raise AssertionError


class PolicyWatch:
    """Asks the gateway. `client` has its URL and an admin key."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def model_name(self) -> str:
        """Raises GatewaySilent."""
        try:
            listed = read_json(await self._get("/v1/models"))
            return str(listed["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise GatewayRefused(f"the gateway's list of models cannot be read: {error}") from error

    async def serving(self) -> int:
        """The newest version that is served; 0 before there is one. Raises GatewaySilent."""
        return (await self._read("/admin/status", SystemStatus)).policy.serving or 0

    async def published_after(self, version: int) -> list[PolicyVersion]:
        """The later versions that were served, in their order. Raises GatewaySilent."""
        page = await self._read("/admin/policies", PolicyPage)
        served = await self.serving()
        return [each for each in page.data if version < each.version <= served and each.state != "failed"]

    async def _read(self, path: str, kind: type[T]) -> T:
        try:
            return kind.read(await self._get(path))
        except MalformedMessage as error:
            raise GatewayRefused(f"the gateway's answer to {path} cannot be read: {error}") from error

    async def _get(self, path: str) -> bytes:
        try:
            async with clock.timeout(TIMEOUT_S):
                reply = await self._client.get(path, timeout=TIMEOUT_S)
        except (httpx.HTTPError, TimeoutError) as error:
            raise GatewaySilent(f"the gateway: {type(error).__name__}: {error}") from error
        if (status := reply.status_code) != 200:
            kind = GatewaySilent if status in LATER or status >= 500 else GatewayRefused
            raise kind(f"the gateway: HTTP {status}: {error_message(reply.content)}")
        return reply.content
