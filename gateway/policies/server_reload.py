"""Has one rollout server load a version: prepare, load, and, if it takes too long, end it.

prepare ─▶ POST /reload {prepare: true}   fetches and verifies, while the engine goes on
load    ─▶ POST /reload                   pauses, loads, proves, resumes
too slow ─▶ DELETE /reload/{version}      the server says what it serves, and whether it is loading
"""

from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer
from rollout_queue import clock
from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.contract.serving_plan import ServingPlan
from rollout_queue.protocol.message import MalformedMessage, error_code, error_message, first_fault
from rollout_queue.protocol.rollout_server_messages import Aborted, ReloadBody, Reloaded
from rollout_queue.tracing import span, trace_headers

ABORT_TIMEOUT_S = 5.0
LOADING_POLL_S = 0.5
"""How often a server that is late with a load is asked whether it still loads."""
DEFINITE = frozenset({400, 409, 422})
"""Answers that another attempt would get again."""
UNSETTLED = frozenset({"push_replaced", "reload_aborted"})
"""Codes of a 409 that says nothing about the version."""


@dataclass(frozen=True)
class PushOrder:
    """What a server is to serve, and which push says so."""

    record: PolicyRecord
    push: int
    force: bool
    own: bool = False
    """The version is the server's own, of a pin or a canary, and not the fleet's."""

    @classmethod
    def of(cls, plan: ServingPlan, record: PolicyRecord) -> "PushOrder":
        """The order to serve the version that the fleet is to serve."""
        push = plan.push
        if push is None:
            return cls(record, 0, force=False)
        return cls(record, push.id, force=push.force or push.version != record.version)

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def has_any_readers(self) -> bool:
        """Whether all servers may read the files at once: from a shared disk, or an object store. An HTTP
        server is one machine."""
        return not (self.record.location or "").startswith(("http://", "https://"))

    @property
    def key(self) -> tuple[int, int]:
        """Equal for equal orders."""
        return self.push, self.version


class NotLoaded(Exception):
    """A server did not load a version, or did not confirm that it did; the text says why."""

    def __init__(self, message: str, *, definite: bool = False) -> None:
        """`definite`: the server has answered that it will not load this version."""
        super().__init__(message)
        self.definite = definite


class ServerReloads:
    """Sends the requests. `timeout_s` bounds each of preparing and loading."""

    def __init__(self, fleet: Fleet, timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s

    async def prepare(self, server: FleetServer, order: PushOrder, peer: str | None = None) -> None:
        """Have the server fetch and verify the version, from the server `peer` if that is given. Raises
        NotLoaded."""
        try:
            await self._post(server, order, prepare=True, peer=peer)
        except TimeoutError:
            said = await self.abort(server, order.version)
            raise NotLoaded(self._late("prepared", order, said)) from None

    async def load(self, server: FleetServer, order: PushOrder) -> Reloaded:
        """Have the server load the version. Raises NotLoaded unless it confirms that it serves it.

        A server that is late is told to stop. If it is loading already, this waits as long again, because the
        load cannot be stopped.
        """
        try:
            return await self._post(server, order, prepare=False)
        except TimeoutError:
            said, until = await self.abort(server, order.version), clock.monotonic() + self._timeout_s
        while said is not None and said.loading == order.version and clock.monotonic() < until:
            await clock.sleep(LOADING_POLL_S)
            said = await self.abort(server, order.version)
        if said is not None and said.version == order.version and said.loading is None:
            return Reloaded(ok=True, version=order.version, adapters=said.adapters)
        raise NotLoaded(self._late("loaded", order, said))

    async def abort(self, server: FleetServer, version: int) -> Aborted | None:
        """Tell the server to end its reloads of the version. Returns None if it does not answer."""
        url, engine = f"{server.registration.url}/reload/{version}", self._fleet.engine
        with suppress(aiohttp.ClientError, TimeoutError, OSError, MalformedMessage):
            status, body = await engine.request("DELETE", url, ABORT_TIMEOUT_S, self._fleet.headers)
            if status == 200:
                return Aborted.read(body)
        return None

    async def _post(
        self, server: FleetServer, order: PushOrder, *, prepare: bool, peer: str | None = None
    ) -> Reloaded:
        """Raises NotLoaded, TimeoutError."""
        record, engine = order.record, self._fleet.engine
        try:
            asked = ReloadBody(
                version=record.version,
                location=record.location,
                manifest_sha256=record.manifest_sha256,
                force=order.force,
                prepare=prepare,
                peer=peer,
                push=order.push,
            )
            url = f"{server.registration.url}/reload"
            with span("POST /reload", "client", parent=record.trace or None) as reload:
                reload.set(
                    {"rl.policy.version": record.version, "rl.server": server.id, "rl.prepare": prepare}
                )
                headers = {**self._fleet.headers, **trace_headers()}
                status, body = await engine.post(url, asked, self._timeout_s, headers)
                reload.set({"http.response.status_code": status})
        except ValidationError as error:
            raise NotLoaded(first_fault(error), definite=True) from error
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NotLoaded(f"{type(error).__name__}: {error}") from error
        return _confirmed(status, body, record.version, prepare=prepare)

    def _late(self, verb: str, order: PushOrder, said: Aborted | None) -> str:
        late = f"version {order.version} was not {verb} within {self._timeout_s:g} s"
        if said is None:
            return f"{late}, and the server does not answer"
        return f"{late}; the server serves version {said.version}"


def _confirmed(status: int, body: bytes, version: int, *, prepare: bool) -> Reloaded:
    """The server's confirmation that it has prepared or serves the version. Raises NotLoaded for any other
    answer."""
    with suppress(MalformedMessage):
        said = Reloaded.read(body)
        if status == 200 and said.ok and version == (said.prepared if prepare else said.version):
            return said
    definite = status in DEFINITE and error_code(body) not in UNSETTLED
    raise NotLoaded(error_message(body), definite=definite)
