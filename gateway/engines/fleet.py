"""The rollout servers: who is there, who serves which version, who takes the next call.

registration ──▶ Redis ◀── every gateway reads it
poll: GET /status of each ──▶ state, version ──▶ rotation
calls that fail ──▶ breaker ──▶ out of rotation at once, and back by a trial
in rotation: it proved the version that the fleet serves
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

import aiohttp
import msgspec
from redis.asyncio import Redis

from gateway.engines.breaker import Breaker
from gateway.engines.engine import EngineClient, drain
from gateway.engines.placement import place_call
from gateway.engines.stream import version_number
from gateway.errors import NoServer, StateConflict
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.protocol.status import ServerShape, ServerStatus
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0
LATE_ANSWERS = 2
"""In a row: one late answer is a busy machine, two are a dead server."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout server said when it registered; `url` is null for a bare engine."""

    id: str
    engine_url: str
    url: str | None = None
    registered_at: float = 0.0


class ModelInfo(msgspec.Struct, frozen=True):
    """What a bare engine says at `/model_info`, as far as the fleet needs it."""

    weight_version: str = "0"


@dataclass
class FleetServer:
    """One server of the fleet, as this gateway sees it."""

    registration: Registration
    state: str = "unknown"
    version: int | None = None
    held: bool = False
    """An operator took it out of rotation."""
    seen_at: float = 0.0
    error: str | None = "not asked yet"
    in_flight: int = 0
    pushing: bool = False
    """This gateway is telling it to load a policy: its calls are about to wait."""
    breaker: Breaker = field(default_factory=Breaker)
    late: int = 0
    asking: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.registration.id

    def enter(self) -> bool:
        """Count a call as in flight. Says whether it is on trial, to whoever lets it `leave`."""
        self.in_flight += 1
        return self.breaker.enter()

    def leave(self, trial: bool) -> None:
        self.in_flight -= 1
        if trial:
            self.breaker.leave()

    def report(self) -> ServerShape:
        return ServerShape(
            id=self.id,
            url=self.registration.url,
            engine_url=self.registration.engine_url,
            state="draining" if self.held else self.state,
            version=self.version,
            in_flight=self.in_flight,
            breaker=self.breaker.state,
            last_seen=self.seen_at or None,
            error=self.error,
        )


@dataclass
class Fleet:
    """All servers. `serving` is the version that the fleet is to serve."""

    redis: Redis
    engine: EngineClient
    admin_key: str | None
    bare_engines: list[str] = field(default_factory=list)
    servers: dict[str, FleetServer] = field(default_factory=dict)
    serving: int | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        for index, url in enumerate(self.bare_engines):
            registration = Registration(id=f"engine-{index}", engine_url=url.rstrip("/"))
            self.servers[registration.id] = FleetServer(registration)
        self._own = frozenset(self.servers)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}

    # Who is there

    async def register(self, registration: Registration) -> FleetServer:
        """Take up a server, or hear again from one that is known.

        Raises StateConflict for the name of a bare engine, StorageUnavailable.
        """
        self._refuse_own(registration.id)
        stamped = msgspec.structs.replace(registration, registered_at=time.time())
        await stored(self.redis.hset(keys.SERVERS, stamped.id, msgspec.json.encode(stamped).decode()))
        server = self._take_up(stamped)
        await self._asked(server)
        return server

    async def remove(self, server_id: str) -> bool:
        """Forget a server. Says whether there was one. Raises StateConflict for a bare engine."""
        self._refuse_own(server_id)
        removed = await stored(self.redis.hdel(keys.SERVERS, server_id))
        await stored(self.redis.srem(keys.HELD, server_id))
        return self.servers.pop(server_id, None) is not None or bool(removed)

    async def hold(self, server_id: str, held: bool) -> FleetServer | None:
        """Take a server out of rotation, or back, at every gateway. None for a server that is not known."""
        server = self.servers.get(server_id)
        if server is not None:
            change = self.redis.sadd if held else self.redis.srem
            await stored(change(keys.HELD, server_id))
            server.held = held
        return server

    def serve(self, version: int) -> None:
        """From now on servers of this version take the calls."""
        self.serving = version
        self._tell_waiting()

    async def refresh(self) -> None:
        """Read the registrations and ask every server how it is."""
        try:
            await self._read_registrations()
        except StorageUnavailable as error:
            logger.warning("the fleet's registrations cannot be read: %s", error)
        asking = [self._asked(server) for server in list(self.servers.values())]
        if asking:
            # One that answers late keeps nobody from hearing of the others.
            await asyncio.wait(asking, timeout=STATUS_TIMEOUT_S / 10)
        self._tell_waiting()

    async def close(self) -> None:
        """End the questions that are still out."""
        await drain([server.asking for server in self.servers.values() if server.asking is not None])

    def _asked(self, server: FleetServer) -> asyncio.Task[None]:
        """One question at a time to each server."""
        if server.asking is None or server.asking.done():
            server.asking = asyncio.create_task(self._ask(server))
        return server.asking

    def _tell_waiting(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _refuse_own(self, server_id: str) -> None:
        if server_id in self._own:
            message = f"{server_id} is an engine of this gateway's own: gateway.engines lists it"
            raise StateConflict(message, param="id")

    async def _read_registrations(self) -> None:
        asked_at = time.time()
        async with self.redis.pipeline(transaction=False) as reading:
            reading.hgetall(keys.SERVERS)
            reading.get(keys.SERVING)
            reading.smembers(keys.HELD)
            raw, serving, held = await stored(reading.execute())
        self.serving = int(serving) if serving is not None else None
        for value in raw.values():
            registration = msgspec.json.decode(value, type=Registration)
            if registration.id not in self._own:
                self._take_up(registration)
        for server_id, server in list(self.servers.items()):
            registration = server.registration
            # One that registered while Redis was asked is not in the answer.
            known = server_id.encode() in raw or registration.registered_at >= asked_at
            if registration.url is not None and not known:
                del self.servers[server_id]
            server.held = server_id.encode() in held

    def _take_up(self, registration: Registration) -> FleetServer:
        server = self.servers.get(registration.id)
        if server is None or server.registration.engine_url != registration.engine_url:
            server = self.servers[registration.id] = FleetServer(registration)
        else:
            server.registration = registration
        return server

    async def _ask(self, server: FleetServer) -> None:
        """How it is. Never by the engine's /health, which generates, and fails while it is paused."""
        registration, was_ready = server.registration, server.state == "ready"
        try:
            if registration.url is None:
                body = await self.engine.get(f"{registration.engine_url}/model_info", STATUS_TIMEOUT_S)
                info = msgspec.json.decode(body, type=ModelInfo)
                server.state, server.version = "ready", version_number(info.weight_version)
            else:
                body = await self.engine.get(f"{registration.url}/status", STATUS_TIMEOUT_S, self.headers)
                status = ServerStatus.read(body)
                server.state, server.version = status.state, status.version
            server.seen_at, server.error, server.late = time.time(), None, 0
        except TimeoutError:
            server.late += 1
            server.error = f"no answer in {STATUS_TIMEOUT_S:g} s, {server.late} times in a row"
            if server.late >= LATE_ANSWERS:
                server.state = "dead"
        except (aiohttp.ClientError, OSError, ValueError, msgspec.DecodeError) as error:
            server.state, server.error = "dead", f"{type(error).__name__}: {error}"
        if server.state == "ready" and not was_ready:
            server.breaker.try_soon()

    # Who takes the next call

    def _candidates(self, version: int | None, avoid: str) -> list[FleetServer]:
        """The best there are: better one that loads, and keeps its calls waiting, than nobody."""
        able = [
            server
            for server in self.servers.values()
            if server.state in ("ready", "loading") and not server.held and self._serves(server, version)
        ]
        sound = [server for server in able if server.breaker.lets_through]
        able = sound or [server for server in able if not server.breaker.gone]
        if len(able) < 2:
            return able
        able = [server for server in able if server.id != avoid] or able
        return [server for server in able if server.state == "ready" and not server.pushing] or able

    def _serves(self, server: FleetServer, version: int | None) -> bool:
        if version is not None:
            return server.version == version
        # Nobody pushes to a bare engine: it serves what it serves.
        return self.serving is None or server.version == self.serving or server.registration.url is None

    def choose(self, session_id: str, version: int | None = None, avoid: str = "") -> FleetServer | None:
        """Who takes a call now; not the server that is to be avoided, where there is another."""
        return place_call(self._candidates(version, avoid), session_id)

    def has(self, version: int) -> bool:
        """Whether some server serves the version, in rotation or not."""
        return any(server.version == version for server in self.servers.values())

    async def acquire(
        self, session_id: str, version: int | None, wait_s: float, avoid: str = ""
    ) -> FleetServer:
        """Choose, waiting for a server to come into rotation. Raises NoServer when none does."""
        deadline = time.monotonic() + wait_s
        while True:
            server = self.choose(session_id, version, avoid)
            if server is not None:
                return server
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NoServer(self.why_nobody())
            try:
                async with asyncio.timeout(left_s):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def why_nobody(self) -> str:
        if not self.servers:
            return "no rollout server has registered"
        states = ", ".join(
            f"{s.id} is {s.state} at version {s.version}, its breaker {s.breaker.state}"
            for s in self.servers.values()
        )
        return f"no engine can serve version {self.serving}: {states}"

    def works(self, server: FleetServer) -> None:
        """A call got tokens from it."""
        server.breaker.succeeded()
        self._tell_waiting()
