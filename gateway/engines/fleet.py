"""The fleet: all servers that sample answers, the version that each serves, and the choice of one for a call.

registration of a rollout server ──▶ Redis ◀── every gateway reads it
poll: GET /status of each server ──▶ its state and version; the answers of a dead server move
calls that fail ──▶ circuit breaker ──▶ no calls for a while, then a trial call
no sign of life ──▶ silent (`silence.py`) ──▶ no calls until the engine responds

A *bare engine* is an SGLang server of the setting `engines`, without a rollout server. It loads no policies.
A server is *in rotation* (it may get calls) while it is ready or loads weights, is not drained, and serves an
admissible version (`rollout_queue/contract/policies/serving.py`). A bare engine may serve any version. An
operator drains a server to take it out of rotation.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from redis.asyncio import Redis

from gateway.engines.cancellation import cancel_and_wait
from gateway.engines.client import EngineClient
from gateway.engines.fleet_server import FleetServer, Life, Registration
from gateway.engines.identities import STATUS_TIMEOUT_S, distinct
from gateway.engines.placement import ANY, Wish, choose_server
from gateway.engines.server_status import read_status
from gateway.errors import NoServer, StateConflict
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.policies.serving import ServingPlan, plan_of
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

logger = logging.getLogger(__name__)


@dataclass
class Fleet:
    """All servers, and the plan that says which versions may answer calls."""

    redis: Redis
    engine: EngineClient
    admin_key: str | None
    bare_engines: list[str] = field(default_factory=list)
    servers: dict[str, FleetServer] = field(default_factory=dict)
    plan: ServingPlan = field(default_factory=ServingPlan)
    """What all gateways agreed on, as this one has read it last."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the rotation may have changed, and then replaced: calls wait on it for a server."""

    def __post_init__(self) -> None:
        for index, url in enumerate(self.bare_engines):
            registration = Registration(id=f"engine-{index}", engine_url=url.rstrip("/"))
            self.servers[registration.id] = FleetServer(registration)
        self._bare_ids = frozenset(self.servers)
        self._set_plan(self.plan)
        self._changes = 0  # how often `adopt` and `set_drained` were called
        self._former: list[FleetServer] = []
        """Servers that left the fleet, or that registered with another engine, while they had answers."""

    @property
    def serving(self) -> int | None:
        """The newest version that a server has proved; None before the first policy."""
        return self.plan.serving

    @property
    def headers(self) -> dict[str, str]:
        """The authorization that rollout servers expect."""
        return {"authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}

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
        known = (await stored(self.redis.hgetall(keys.SERVERS))).values()
        earlier = [msgspec.json.decode(value, type=Registration) for value in known]
        registration, taken = await distinct(registration, earlier, self.engine, self.headers)
        for server_id in taken:
            logger.info("rollout server %s takes the place of %s", registration.id, server_id)
            await self.remove(server_id)
        stamped = msgspec.structs.replace(registration, registered_at=time.time())
        await stored(self.redis.hset(keys.SERVERS, stamped.id, msgspec.json.encode(stamped).decode()))
        server = self._add(stamped)
        await self._status_request(server)
        return server

    async def remove(self, server_id: str) -> bool:
        """Remove a server. Returns whether it was known. Raises StateConflict for a bare engine."""
        self._check_not_bare(server_id)
        removed = await stored(self.redis.hdel(keys.SERVERS, server_id))
        await stored(self.redis.srem(keys.HELD, server_id))
        return self._drop(server_id) or bool(removed)

    async def set_drained(self, server_id: str, drained: bool) -> FleetServer | None:
        """Take a server out of rotation, or put it back, for every gateway. Returns None if it is unknown."""
        server = self.servers.get(server_id)
        if server is not None:
            change = self.redis.sadd if drained else self.redis.srem
            await stored(change(keys.HELD, server_id))
            server.drained = drained
            self._changes += 1
        return server

    def adopt(self, plan: ServingPlan) -> None:
        """From now on, servers with a version that this plan admits take the calls."""
        if plan == self.plan:
            return
        self._set_plan(plan)
        self._changes += 1
        self._wake_waiting()

    async def refresh(self) -> None:
        """Read the registrations, and request the status of every server."""
        try:
            await self._read_registrations()
        except StorageUnavailable as error:
            logger.warning("the fleet's registrations cannot be read: %s", error)
        requests = [self._status_request(server) for server in list(self.servers.values())]
        if requests:
            # A slow server does not delay the others: its request goes on in the background.
            await asyncio.wait(requests, timeout=STATUS_TIMEOUT_S / 10)
        self._wake_waiting()

    async def close(self) -> None:
        """Cancel the status requests in flight."""
        requests = [server.status_request for server in self.servers.values()]
        await cancel_and_wait([request for request in requests if request is not None])

    def _status_request(self, server: FleetServer) -> asyncio.Task[None]:
        """The request for the server's status that is in flight, or a new one."""
        if server.status_request is None or server.status_request.done():
            server.status_request = asyncio.create_task(read_status(server, self.engine, self.headers))
        return server.status_request

    def _set_plan(self, plan: ServingPlan) -> None:
        self.plan, self._admitted = plan, plan.versions
        self._pinned = frozenset(pin.server for pin in plan.pins)

    def _wake_waiting(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _check_not_bare(self, server_id: str) -> None:
        if server_id in self._bare_ids:
            message = f"{server_id} is a bare engine, from the setting gateway.engines"
            raise StateConflict(message, param="id")

    async def _read_registrations(self) -> None:
        read_at, changes = time.time(), self._changes
        async with self.redis.pipeline(transaction=False) as reading:
            reading.hgetall(keys.SERVERS)
            reading.get(keys.SERVING)
            reading.smembers(keys.HELD)
            raw, packed, drained = await stored(reading.execute())
        if current := changes == self._changes:  # else it changed after Redis was read
            self._set_plan(plan_of(packed))
        for value in raw.values():
            registration = msgspec.json.decode(value, type=Registration)
            if registration.id not in self._bare_ids:
                self._add(registration)
        for server_id, server in list(self.servers.items()):
            registration = server.registration
            # A server that registered while Redis was read may be missing from the result.
            known = server_id.encode() in raw or registration.registered_at >= read_at
            if registration.url is not None and not known:
                self._drop(server_id)
            server.drained = server_id.encode() in drained if current else server.drained
            if server.is_forgotten(read_at) and self._drop(server_id):
                await stored(self.redis.hdel(keys.SERVERS, server_id))
                logger.info("rollout server %s is dead and forgotten", server_id)

    def _add(self, registration: Registration) -> FleetServer:
        server = self.servers.get(registration.id)
        if server is None or server.registration.engine_url != registration.engine_url:
            self._drop(registration.id)
            server = self.servers[registration.id] = FleetServer(registration)
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

    def _candidates(self, wish: Wish, avoid: str) -> list[FleetServer]:
        """The servers from which the one for a call is chosen; those of a canary only if no other can."""
        if (version := wish.version) is not None:
            return self._able(lambda server: server.can_answer(version, wish.adapter), avoid)
        preferred = [s for s in self.servers.values() if s.version == wish.prefers and s.takes_calls]
        found = [server for server in preferred if server.id != avoid] if wish.prefers is not None else []
        if found := found or self._able(self._admits, avoid):
            return found
        canary = self.plan.active_canary
        return self._able(lambda server: server.version == canary.version, avoid) if canary else []

    def _able(self, serves: Callable[[FleetServer], bool], avoid: str) -> list[FleetServer]:
        """The servers with such a version that can take a call.

        These are left out unless no other is left: servers with an open breaker, the server `avoid`, and
        servers that load weights, because calls wait there. A server that refused its last connection is left
        out in any case while its breaker is open, and a silent one until its engine responds.
        """
        able = [
            server
            for server in self.servers.values()
            if server.state in ("ready", "loading")
            and not (server.drained or server.silent)
            and serves(server)
        ]
        sound = [server for server in able if server.breaker.allows_call]
        able = sound or [server for server in able if not server.breaker.unreachable]
        if len(able) < 2:
            return able
        able = [server for server in able if server.id != avoid] or able
        return [server for server in able if server.state == "ready" and not server.pushing] or able

    def can_replace(self, server: FleetServer, wish: Wish, lives: Callable[[FleetServer], bool]) -> bool:
        """Whether another server, for which `lives` is true, can take over a call now."""
        others = (other for other in self._candidates(wish, server.id) if other is not server)
        return any(other.able and lives(other) for other in others)

    def _admits(self, server: FleetServer) -> bool:
        # Policies are not pushed to bare engines, so their version does not matter.
        admitted = not self._admitted or server.version in self._admitted
        return server.registration.url is None or (admitted and server.id not in self._pinned)

    def choose(self, session_id: str, wish: Wish = ANY, avoid: str = "") -> FleetServer | None:
        """The server that takes a call now, if any; the server `avoid` only if there is no other."""
        return choose_server(self._candidates(wish, avoid), session_id)

    def has(self, version: int) -> bool:
        """Whether any server can answer with the version, in rotation or not."""
        return any(server.can_answer(version) for server in self.servers.values())

    async def acquire(self, session_id: str, wish: Wish, wait_s: float, avoid: str = "") -> FleetServer:
        """Choose a server; wait up to `wait_s` seconds until one can take the call. Raises NoServer."""
        deadline = time.monotonic() + wait_s
        while True:
            server = self.choose(session_id, wish, avoid)
            if server is not None:
                return server
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NoServer(self.why_no_server())
            try:
                async with asyncio.timeout(left_s):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def why_no_server(self) -> str:
        """Why no server can take a call."""
        if not self.servers:
            return "no rollout server has registered"
        states = ", ".join(
            f"{s.id} is {'silent' if s.silent else s.state} at version {s.version}, "
            f"its breaker {s.breaker.state}"
            for s in self.servers.values()
        )
        return f"no engine can serve version {self.serving}: {states}"

    @property
    def in_rotation(self) -> int:
        """How many rollout servers can take a call now."""
        return sum(s.live and not s.loads and not s.silent and self._admits(s) for s in self.rollout_servers)

    @property
    def rollout_servers(self) -> list[FleetServer]:
        """The servers that take part in a push. A bare engine takes none."""
        return [server for server in self.servers.values() if server.registration.url is not None]

    def call_succeeded(self, server: FleetServer) -> None:
        """A call received tokens from the server."""
        server.breaker.succeeded()
        self._wake_waiting()

    def is_heard_again(self, server: FleetServer, life: Life) -> None:
        """A silent server has responded to a probe: if no other sign of life is missing, it gets a trial
        call."""
        server.silent.discard(life)
        if not server.silent:
            server.breaker.try_soon()
        self._wake_waiting()
