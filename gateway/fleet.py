"""The rollout servers: who is there, who serves which version, who takes the next call.

registration ──▶ Redis ◀── every gateway reads it
poll: GET /status of each ──▶ state, version, load ──▶ rotation
in rotation: it proved the version that the fleet serves
"""

import asyncio
import logging
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from redis.asyncio import Redis

from gateway.engine import EngineClient, version_number
from rollout_queue import keys
from rollout_queue.availability import stored
from rollout_queue.errors import StorageUnavailable
from rollout_queue.web.errors import ApiError

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout server said when it registered; `url` is null for a bare engine."""

    id: str
    engine_url: str
    url: str | None = None
    registered_at: float = 0.0


class Status(msgspec.Struct, frozen=True):
    """What a rollout server says at `/status`, as far as the fleet needs it."""

    state: str
    version: int | None


class ModelInfo(msgspec.Struct, frozen=True):
    """What a bare engine says at `/model_info`, as far as the fleet needs it."""

    weight_version: str = "0"


@dataclass
class RolloutServer:
    """One server of the fleet, as this gateway sees it."""

    registration: Registration
    state: str = "unknown"
    version: int | None = None
    held: bool = False
    """An operator took it out of rotation."""
    seen_at: float = 0.0
    error: str | None = "not asked yet"
    in_flight: int = 0

    @property
    def id(self) -> str:
        return self.registration.id

    def report(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "url": self.registration.url,
            "engine_url": self.registration.engine_url,
            "state": "draining" if self.held else self.state,
            "version": self.version,
            "in_flight": self.in_flight,
            "last_seen": self.seen_at or None,
            "error": self.error,
        }


@dataclass
class Fleet:
    """All servers. `serving` is the version that the fleet is to serve."""

    redis: Redis
    engine: EngineClient
    admin_key: str | None
    bare_engines: list[str] = field(default_factory=list)
    servers: dict[str, RolloutServer] = field(default_factory=dict)
    serving: int | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        for index, url in enumerate(self.bare_engines):
            registration = Registration(id=f"engine-{index}", engine_url=url.rstrip("/"))
            self.servers[registration.id] = RolloutServer(registration)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}

    # Who is there

    async def register(self, registration: Registration) -> RolloutServer:
        """Take up a server, or hear again from one that is known. Raises StorageUnavailable."""
        stamped = msgspec.structs.replace(registration, registered_at=time.time())
        await stored(self.redis.hset(keys.SERVERS, stamped.id, msgspec.json.encode(stamped).decode()))
        server = self._take_up(stamped)
        await self._ask(server)
        return server

    async def remove(self, server_id: str) -> bool:
        """Forget a server. Says whether there was one."""
        removed = await stored(self.redis.hdel(keys.SERVERS, server_id))
        await stored(self.redis.srem(keys.HELD, server_id))
        return self.servers.pop(server_id, None) is not None or bool(removed)

    async def hold(self, server_id: str, held: bool) -> RolloutServer | None:
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
        await asyncio.gather(*(self._ask(server) for server in list(self.servers.values())))
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _read_registrations(self) -> None:
        async with self.redis.pipeline(transaction=True) as reading:
            reading.hgetall(keys.SERVERS)
            reading.get(keys.SERVING)
            reading.smembers(keys.HELD)
            raw, serving, held = await stored(reading.execute())
        self.serving = int(serving) if serving is not None else None
        for value in raw.values():
            self._take_up(msgspec.json.decode(value, type=Registration))
        for server_id, server in list(self.servers.items()):
            if server.registration.url is not None and server_id.encode() not in raw:
                del self.servers[server_id]
            server.held = server_id.encode() in held

    def _take_up(self, registration: Registration) -> RolloutServer:
        server = self.servers.get(registration.id)
        if server is None or server.registration.engine_url != registration.engine_url:
            server = self.servers[registration.id] = RolloutServer(registration)
        else:
            server.registration = registration
        return server

    async def _ask(self, server: RolloutServer) -> None:
        registration = server.registration
        try:
            if registration.url is None:
                said = await self.engine.get_json(f"{registration.engine_url}/model_info", STATUS_TIMEOUT_S)
                info = msgspec.convert(said, ModelInfo)
                server.state, server.version = "ready", version_number(info.weight_version)
            else:
                said = await self.engine.get_json(
                    f"{registration.url}/status", STATUS_TIMEOUT_S, self.headers
                )
                status = msgspec.convert(said, Status)
                server.state, server.version = status.state, status.version
            server.seen_at, server.error = time.time(), None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.ValidationError) as error:
            server.state, server.error = "dead", f"{type(error).__name__}: {error}"

    # Who takes the next call

    def _candidates(self, version: int | None) -> list[RolloutServer]:
        able = [
            server
            for server in self.servers.values()
            if server.state in ("ready", "loading") and not server.held and self._serves(server, version)
        ]
        # A server that loads a policy keeps its calls waiting, not failing: better than nobody.
        return [server for server in able if server.state == "ready"] or able

    def _serves(self, server: RolloutServer, version: int | None) -> bool:
        if version is not None:
            return server.version == version
        # Nobody pushes to a bare engine: it serves what it serves.
        return self.serving is None or server.version == self.serving or server.registration.url is None

    def choose(self, session_id: str, version: int | None = None) -> RolloutServer | None:
        """The least loaded server; among equals always the same one for a session, for its prefix cache."""
        candidates = self._candidates(version)
        return min(candidates, key=lambda s: (s.in_flight, _affinity(session_id, s.id)), default=None)

    async def acquire(self, session_id: str, version: int | None, wait_s: float) -> RolloutServer:
        """Choose, waiting for a server to come into rotation. Raises ApiError 503 when none does."""
        deadline = time.monotonic() + wait_s
        while True:
            server = self.choose(session_id, version)
            if server is not None:
                return server
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ApiError(503, self.why_nobody())
            try:
                async with asyncio.timeout(left_s):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def why_nobody(self) -> str:
        if not self.servers:
            return "no rollout server has registered"
        states = ", ".join(f"{s.id} is {s.state} at version {s.version}" for s in self.servers.values())
        return f"no engine can serve version {self.serving}: {states}"

    @contextmanager
    def load(self, server: RolloutServer) -> Iterator[None]:
        """Count a call as in flight on `server`."""
        server.in_flight += 1
        try:
            yield
        finally:
            server.in_flight -= 1


def _affinity(session_id: str, server_id: str) -> int:
    """The same number at every gateway and after every restart, as Python's own hash is not."""
    return zlib.crc32(f"{session_id} {server_id}".encode())
