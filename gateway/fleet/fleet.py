"""The fleet: which servers there are, what each says of itself, and which versions may answer calls.

registration of a rollout server ──▶ Redis ◀── every gateway reads it
poll: GET /status of each server ──▶ its state and version; the answers of a dead server move
calls that fail ──▶ circuit breaker ──▶ no calls for a while, then a trial call
no sign of life ──▶ silent (`silence.py`) ──▶ no calls until the engine responds

A *bare engine* is an SGLang server of the setting `engines`, without a rollout server. It loads no policies.
A server is *in rotation* (it may get calls) while it is ready or loads weights, is not drained, and serves an
admissible version (`rollout_queue/contract/serving_plan.py`). A bare engine may serve any version. An
operator drains a server to take it out of rotation.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from redis.asyncio import Redis

from gateway.cancellation import cancel_and_wait
from gateway.counters import FleetFigures
from gateway.errors import NoServer, StateConflict
from gateway.fleet.call_queue import CallQueue
from gateway.fleet.engine_client import EngineClient
from gateway.fleet.fleet_server import FleetServer, Life, Registration, next_limit
from gateway.fleet.generate_request import ANY, AllowedVersions
from gateway.fleet.placement import Rotation, WantedServer
from gateway.fleet.registrations import (
    KnownRegistrations,
    remove_registration,
    renewed,
    set_held,
    write_registration,
)
from gateway.fleet.server_status import STATUS_TIMEOUT_S, StatusSchedule, distinct, read_status
from gateway.fleet.suspects import Suspects
from gateway.settings import ConcurrencySettings
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.serving_plan import ServingPlan
from rollout_queue.http.callers import bearer
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.lua import Confirm

logger = logging.getLogger(__name__)

DESCRIBED = 8
"""How many servers an error describes."""


@dataclass
class Fleet:
    """All servers, and the plan that says which versions may answer calls."""

    redis: Redis
    engine: EngineClient
    server_key: str | None
    bare_engines: list[str] = field(default_factory=list)
    servers: dict[str, FleetServer] = field(default_factory=dict)
    concurrency: ConcurrencySettings = field(default_factory=ConcurrencySettings)
    confirm: Confirm | None = None

    def __post_init__(self) -> None:
        self.rotation = Rotation(self.servers)
        self.queue = CallQueue(self.rotation)
        for index, url in enumerate(self.bare_engines):
            registration = Registration(id=f"engine-{index}", engine_url=url.rstrip("/"))
            self.servers[registration.id] = FleetServer(registration, freed=self.queue.freed)
        self._bare_ids = frozenset(self.servers)
        self.suspects = Suspects(self.redis)
        self._schedule = StatusSchedule()
        self._known = KnownRegistrations()
        self._changes = 0  # how often `adopt` and `set_drained` were called
        self._former: list[FleetServer] = []
        """Servers that left the fleet, or that registered with another engine, while they had answers."""

    @property
    def plan(self) -> ServingPlan:
        """What all gateways agreed on, as this one has read it last."""
        return self.rotation.plan

    @property
    def serving(self) -> int | None:
        """The newest version that a server has proved; None before the first policy."""
        return self.plan.serving

    @property
    def headers(self) -> dict[str, str]:
        """The authorization that rollout servers expect."""
        return bearer(self.server_key)

    @property
    def answering(self) -> list[FleetServer]:
        """All servers, and those that left the fleet and still have answers in flight."""
        self._former = [server for server in self._former if server.waits]
        return [*self.servers.values(), *self._former]

    # Registration and state

    async def register(self, registration: Registration) -> FleetServer:
        """Store a registration, new or renewed, and request the server's status.

        Raises StateConflict for the id of a bare engine and for a second server under one id or URL, and
        StorageUnavailable.
        """
        self._check_not_bare(registration.id)
        stamped = await renewed(self.redis, registration)
        if stamped is None:
            known = (await stored(self.redis.hgetall(key_names.SERVERS))).values()
            earlier = [msgspec.json.decode(value, type=Registration) for value in known]
            registration, taken = await distinct(registration, earlier, self.engine, self.headers)
            for server_id in taken:
                logger.info("rollout server %s takes the place of %s", registration.id, server_id)
                await self.remove(server_id)
            stamped = await write_registration(self.redis, registration)
        server = self._add(stamped)
        await self._status_request(server)
        return server

    async def remove(self, server_id: str) -> bool:
        """Remove a server. Returns whether it was known. Raises StateConflict for a bare engine."""
        self._check_not_bare(server_id)
        removed = await remove_registration(self.redis, server_id)
        await set_held(self.redis, [server_id], drained=False)
        return self._drop(server_id) or bool(removed)

    async def set_drained(self, server_id: str, drained: bool) -> FleetServer | None:
        """Take a server out of rotation, or put it back, for every gateway. Returns None if it is unknown."""
        server = self.servers.get(server_id)
        if server is not None:
            await set_held(self.redis, [server_id], drained=drained)
            server.drained = drained
            self._changes += 1
        return server

    def adopt(self, plan: ServingPlan) -> None:
        """From now on, servers with a version that this plan admits take the calls, also those that wait."""
        if plan == self.plan:
            return
        self.rotation.set_plan(plan)
        self._changes += 1
        self.queue.serve()

    async def refresh(self) -> None:
        """Read the registrations, and request the status of the servers whose turn it is."""
        try:
            await self._read_registrations()
            await self.suspects.refresh()
        except StorageUnavailable as error:
            logger.warning("the fleet's state cannot be read: %s", error)
        due = self._schedule.due(self.servers.values(), clock.monotonic())
        requests = [self._status_request(server) for server in due]
        if requests:
            # A slow server does not delay the others: its request goes on in the background.
            await clock.wait_tasks(requests, STATUS_TIMEOUT_S / 10)
        self.queue.serve()

    async def close(self) -> None:
        """Cancel the status requests in flight, and the judging of suspects."""
        requests = [server.status_request for server in self.servers.values()]
        await cancel_and_wait([request for request in requests if request is not None])
        await self.suspects.close()

    def _status_request(self, server: FleetServer) -> asyncio.Task[None]:
        """The request for the server's status that is in flight, or a new one."""
        if server.status_request is None or server.status_request.done():
            server.status_request = asyncio.create_task(self._read_status(server))
        return server.status_request

    async def _read_status(self, server: FleetServer) -> None:
        """Update the server's state, and its limit of calls."""
        await read_status(server, self.engine, self.headers)
        if server.state == "ready" and server.engine_load is not None:
            server.limit = next_limit(server.limit, server.engine_load, self.concurrency)
        elif server.state == "dead":
            server.limit = None  # its engine starts anew

    def _check_not_bare(self, server_id: str) -> None:
        if server_id in self._bare_ids:
            message = f"{server_id} is a bare engine, from the setting gateway.engines"
            raise StateConflict(message, param="id")

    async def _read_registrations(self) -> None:
        changes, pushes = self._changes, {server.id: server.push for server in self.servers.values()}
        read = await self._known.read(self.redis, self.plan, self.servers.values())
        if current := changes == self._changes:  # else it changed after Redis was read
            self.rotation.set_plan(read.plan)
        for registration in read.registrations.values() if read.fresh else ():
            if registration.id not in self._bare_ids:
                self._add(registration)
        for server_id, server in list(self.servers.items()):
            registration = server.registration
            # A server that registered after Redis was read may be missing from the result.
            known = server_id in read.registrations or registration.registered_at >= read.read_at
            if registration.url is not None and not known:
                self._drop(server_id)
            server.watched = server_id in read.loading
            # Its status is older than this reading of the plan, so Redis has lost the push.
            server.ahead = pushes.get(server_id, 0) > self.plan.newest_id
            server.drained = server_id in read.drained if current else server.drained
            if server.is_forgotten(clock.now()) and self._drop(server_id):
                await remove_registration(self.redis, server_id)
                logger.info("rollout server %s is dead and forgotten", server_id)

    def _add(self, registration: Registration) -> FleetServer:
        server = self.servers.get(registration.id)
        if server is None or server.registration.engine_url != registration.engine_url:
            self._drop(registration.id)
            server = self.servers[registration.id] = FleetServer(registration, freed=self.queue.freed)
        else:
            server.registration = registration
        return server

    def _drop(self, server_id: str) -> bool:
        """Take a server out of the fleet; its answers go on. Returns whether it was there."""
        server = self.servers.pop(server_id, None)
        if server is not None:
            self._former.append(server)
        return server is not None

    # The choice of a server

    def can_replace(
        self, server: FleetServer, allowed: AllowedVersions, lives: Callable[[FleetServer], bool]
    ) -> bool:
        """Whether another server, for which `lives` is true, can take over a call now."""
        return any(other.able and lives(other) for other in self.rotation.replacements(allowed, server))

    def has(self, version: int) -> bool:
        """Whether any server can answer with the version, in rotation or not, or comes back with it."""
        kept = {self.serving, *(pin.version for pin in self.plan.pins)}
        return version in kept or any(server.can_answer(version) for server in self.servers.values())

    async def acquire(self, wanted: WantedServer, wait_s: float) -> FleetServer:
        """The server for a call, which enters it at once, or NoServer after `wait_s` seconds."""
        if not self.queue.waits_for(wanted.allowed) and (server := self.rotation.place(wanted)) is not None:
            return server
        try:
            return await self.queue.wait(wanted, wait_s)
        except TimeoutError:
            raise NoServer(self.why_no_server(wanted.allowed)) from None

    def fault(self) -> str | None:
        """Why no server can take calls; None if one can, also if it is full for a moment."""
        serves = any(server.takes_calls for server in self.rotation.candidates(ANY, ""))
        return None if serves else self.why_no_server()

    def why_no_server(self, allowed: AllowedVersions = ANY) -> str:
        """Why no server can take a call now."""
        if not self.servers:
            return "no rollout server has registered"
        if full := [server for server in self.rotation.candidates(allowed, "") if server.takes_calls]:
            loads = _first(f"{s.id} has {s.load} of {s.limit} calls" for s in full)
            return f"all engines are full: {loads}; {len(self.queue)} wait"
        version = self.serving if allowed.version is None else allowed.version
        return f"no engine can serve version {version}: {_first(map(str, self.servers.values()))}"

    def figures(self) -> FleetFigures:
        """What is measured of the fleet."""
        return self.rotation.figures(len(self.queue))

    @property
    def in_rotation(self) -> int:
        """How many rollout servers can take a call now."""
        servers = self.rollout_servers
        return sum(s.live and not s.loads and not s.silent and self.rotation.admits(s) for s in servers)

    @property
    def rollout_servers(self) -> list[FleetServer]:
        """The servers that take part in a push. A bare engine takes none."""
        return [server for server in self.servers.values() if server.registration.url is not None]

    def call_succeeded(self, server: FleetServer) -> None:
        """A call received tokens from the server."""
        server.breaker.succeeded()
        self.queue.serve()

    def responds_again(self, server: FleetServer, life: Life) -> None:
        """A silent server has responded to a probe: if no other sign of life is missing, it gets a trial
        call."""
        server.silent.discard(life)
        if not server.silent:
            server.breaker.try_soon()
        self.queue.serve()


def _first(described: Iterable[str]) -> str:
    every = list(described)
    more = [f"and {len(every) - DESCRIBED} more"] if len(every) > DESCRIBED else []
    return ", ".join(every[:DESCRIBED] + more)
