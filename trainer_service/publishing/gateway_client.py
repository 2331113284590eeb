"""A client for the part of the gateway's admin API that publishing needs."""

from typing import TypeVar

import httpx

from rollout_queue.protocol.gateway_messages import (
    PolicyBody,
    PolicyDetail,
    PolicyPage,
    PolicyVersion,
    Pushed,
    PushResult,
    RollbackBody,
    ServingShape,
)
from rollout_queue.protocol.message import MalformedMessage, ServiceMessage, error_message
from rollout_queue.protocol.rollout_server_messages import AdapterBody, AdapterPushed
from rollout_queue.tracing import trace_headers

Reply = TypeVar("Reply", bound=ServiceMessage)
ANSWER_TIMEOUT_S = 10.0


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
        return max((policy.version for policy in self.policies()), default=0)

    def policies(self) -> tuple[PolicyVersion, ...]:
        """Every version that the gateway can have served."""
        return _read(PolicyPage, self._call("GET", "/admin/policies")).data

    def serves(self, version: int) -> bool:
        """Whether the fleet serves `version`, and no other version is to be served next."""
        serving = _read(ServingShape, self._call("GET", "/admin/policies/serving"))
        return serving.serving == serving.target == version

    def announce(
        self, version: int, location: str, manifest_sha256: str, step: int, size_bytes: int | None = None
    ) -> Pushed:
        """Have a version pushed to every server; does not wait for them. Raises VersionTaken when the number
        cannot be used."""
        body = PolicyBody(
            version=version,
            location=location,
            manifest_sha256=manifest_sha256,
            step=step,
            size_bytes=size_bytes,
        )
        reply = self._call("POST", "/admin/policies?wait=false", body)
        if reply.status_code == 409:
            raise VersionTaken(error_message(reply.content))
        return _read(Pushed, reply)

    def push_of(self, version: int) -> PolicyDetail:
        """The version with its last push, and the results so far. Raises VersionUnknown."""
        reply = self._call("GET", f"/admin/policies/{version}")
        if reply.status_code == 404:
            raise VersionUnknown(error_message(reply.content))
        return _read(PolicyDetail, reply)

    def remove(self, version: int) -> bool:
        """Have the gateway forget a version, because its files are to be removed. Returns False if it still
        needs the version."""
        return self._call("DELETE", f"/admin/policies/{version}").status_code != 409

    def roll_back(self, version: int) -> tuple[PushResult, ...]:
        """Have a known version pushed to every server again, under its own number, and wait for it; returns
        one result per server. Raises VersionUnknown."""
        body = RollbackBody(to=version, hold=False)
        reply = self._call("POST", "/admin/policies/rollback", body, timeout_s=self._push_timeout_s)
        if reply.status_code == 404:
            raise VersionUnknown(error_message(reply.content))
        return _read(Pushed, reply).results

    def publish_adapter(self, name: str, version: int, location: str, manifest_sha256: str) -> AdapterPushed:
        """Have every live server load an adapter, and wait for them. The same again changes nothing. It makes
        room for later ones, and comes back when it is called.

        Raises VersionTaken if the name has had another content under this version.
        """
        body = AdapterBody(
            name=name, version=version, location=location, manifest_sha256=manifest_sha256, passing=True
        )
        reply = self._call("POST", "/admin/adapters", body, timeout_s=self._push_timeout_s)
        if reply.status_code == 409:
            raise VersionTaken(error_message(reply.content))
        return _read(AdapterPushed, reply)

    def remove_adapter(self, name: str, version: int) -> None:
        """Have servers forget an adapter. One that is not there is no error."""
        self._call("DELETE", f"/admin/adapters/{name}/{version}", timeout_s=self._push_timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        body: ServiceMessage | None = None,
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> httpx.Response:
        json = None if body is None else body.model_dump()
        try:
            headers = trace_headers()
            reply = self._client.request(method, path, json=json, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise GatewayUnavailable(f"{type(error).__name__}: {error}") from error
        if reply.status_code not in (200, 202, 207, 404, 409):
            raise GatewayUnavailable(f"HTTP {reply.status_code}: {error_message(reply.content)}")
        return reply


def _read(message: type[Reply], reply: httpx.Response) -> Reply:
    """The answer as a message. Raises GatewayUnavailable if it has another form: a proxy may have sent it."""
    try:
        return message.read(reply.content)
    except MalformedMessage as error:
        raise GatewayUnavailable(f"HTTP {reply.status_code}, not understood: {reply.text[:200]}") from error
