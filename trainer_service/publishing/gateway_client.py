"""A client for the part of the gateway's admin API that publishing needs."""

from typing import TypeVar

import httpx

from rollout_queue.protocol.errors import error_message
from rollout_queue.protocol.message import MalformedMessage, ServiceMessage
from rollout_queue.protocol.policies import PolicyBody, PolicyPage, Pushed, PushResult, RollbackBody
from rollout_queue.protocol.status import PolicyStatus

Reply = TypeVar("Reply", bound=ServiceMessage)


class GatewayUnavailable(Exception):
    """The gateway cannot be reached, or cannot answer now. The same call may succeed later."""


class VersionTaken(Exception):
    """The gateway refuses this version number: it is too low, or belongs to other weights."""


class VersionUnknown(Exception):
    """The gateway knows no version with this number."""


class GatewayClient:
    """Every method raises GatewayUnavailable if the gateway gives no answer, or none that is readable."""

    def __init__(self, client: httpx.Client, push_timeout_s: float) -> None:
        self._client = client
        self._push_timeout_s = push_timeout_s

    def newest_version(self) -> int:
        """The highest version number that the gateway knows; 0 if it knows none."""
        reply = self._call("GET", "/admin/policies", timeout_s=10.0)
        return max((policy.version for policy in _read(PolicyPage, reply).data), default=0)

    def oldest_needed(self) -> int | None:
        """The older of two versions: the one that the fleet serves, and the one that it is to serve next.
        None if there is neither."""
        return min(self._serving_and_target(), default=None)

    def serves(self, version: int) -> bool:
        """Whether the fleet serves `version`, and no other version is to be served next."""
        return self._serving_and_target() == [version, version]

    def _serving_and_target(self) -> list[int]:
        """The version that is served and the one that is to be served next. One that is missing is left
        out."""
        reply = self._call("GET", "/admin/status", timeout_s=10.0)
        policy = _read(PolicyStatus, reply).policy
        return [version for version in (policy.serving, policy.target) if version is not None]

    def announce(
        self, version: int, location: str, manifest_sha256: str, step: int
    ) -> tuple[PushResult, ...]:
        """Have a version pushed to every server; returns one result per server. Raises VersionTaken when the
        number cannot be used."""
        body = PolicyBody(version=version, location=location, manifest_sha256=manifest_sha256, step=step)
        reply = self._call("POST", "/admin/policies", self._push_timeout_s, body)
        if reply.status_code == 409:
            raise VersionTaken(error_message(reply.content))
        return _read(Pushed, reply).results

    def roll_back(self, version: int) -> tuple[PushResult, ...]:
        """Have a known version pushed to every server again, under its own number; returns one result per
        server. Raises VersionUnknown."""
        body = RollbackBody(to=version)
        reply = self._call("POST", "/admin/policies/rollback", self._push_timeout_s, body)
        if reply.status_code == 404:
            raise VersionUnknown(error_message(reply.content))
        return _read(Pushed, reply).results

    def _call(
        self, method: str, path: str, timeout_s: float, body: ServiceMessage | None = None
    ) -> httpx.Response:
        json = None if body is None else body.model_dump()
        try:
            reply = self._client.request(method, path, json=json, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise GatewayUnavailable(f"{type(error).__name__}: {error}") from error
        if reply.status_code not in (200, 207, 404, 409):
            raise GatewayUnavailable(f"HTTP {reply.status_code}: {error_message(reply.content)}")
        return reply


def _read(message: type[Reply], reply: httpx.Response) -> Reply:
    """The answer as a message. Raises GatewayUnavailable if it has another form: a proxy may have sent it."""
    try:
        return message.read(reply.content)
    except MalformedMessage as error:
        raise GatewayUnavailable(f"HTTP {reply.status_code}, not understood: {reply.text[:200]}") from error
