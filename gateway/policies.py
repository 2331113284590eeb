"""Published policies: numbered once, pushed to every rollout server, reported per server.

POST /admin/policies ──▶ record ──▶ POST /reload on each server ──▶ serving = version, if any server took it
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any, cast

import aiohttp
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.fleet import Fleet, RolloutServer
from rollout_queue import keys
from rollout_queue.errors import StorageUnavailable
from rollout_queue.policy import PolicyRecord
from rollout_queue.web.errors import ApiError

logger = logging.getLogger(__name__)


class PushResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one server made of a push."""

    server: str
    ok: bool
    version_served: int | None = None
    paused_s: float | None = None
    total_s: float
    error: str | None = None


class Policies:
    """The register of versions, and the push to the fleet. One push at a time."""

    def __init__(self, redis: Redis, fleet: Fleet, push_timeout_s: float) -> None:
        self._redis = redis
        self._fleet = fleet
        self._push_timeout_s = push_timeout_s
        self._pushing = asyncio.Lock()
        self.target: int | None = None
        """The version of the push that goes on, or went last."""

    async def all(self) -> list[PolicyRecord]:
        """Every known version, ascending. Raises StorageUnavailable."""
        try:
            raw = await cast(Awaitable[dict[bytes, bytes]], self._redis.hgetall(keys.POLICIES))
        except (RedisError, OSError) as error:
            raise StorageUnavailable(f"Redis: {error}") from error
        records = (msgspec.json.decode(value, type=PolicyRecord) for value in raw.values())
        return sorted(records, key=lambda record: record.version)

    async def current(self) -> PolicyRecord | None:
        """The policy that a server is to serve."""
        known = {record.version: record for record in await self.all()}
        return known.get(self._fleet.serving) if self._fleet.serving is not None else None

    async def note_initial(self, version: int) -> None:
        """Register the version that the engines started with, and serve it unless another is served."""
        record = PolicyRecord(version=version, created_at=time.time(), state="serving")
        stored = msgspec.json.encode(record).decode()
        created = await _stored(self._redis.hsetnx(keys.POLICIES, str(version), stored))
        if created and await _stored(self._redis.set(keys.SERVING, version, nx=True)):
            self._fleet.serving = version

    async def publish(
        self, version: int | None, location: str, manifest_sha256: str | None, step: int | None
    ) -> tuple[int, list[PushResult]]:
        """Register a version and push it.

        Raises ApiError 409 for a lower number, or a known one with other content.
        """
        async with self._pushing:
            known = {record.version: record for record in await self.all()}
            newest = max(known, default=0)
            version = newest + 1 if version is None else version
            existing = known.get(version)
            if existing is not None and (existing.location, existing.manifest_sha256) != (
                location,
                manifest_sha256,
            ):
                raise ApiError(409, f"version {version} is known with other content", param="version")
            if existing is None and version < newest:
                raise ApiError(409, f"version {version} is lower than {newest}", param="version")
            record = existing or PolicyRecord(
                version=version,
                location=location,
                manifest_sha256=manifest_sha256,
                step=step,
                created_at=time.time(),
            )
            await self._store(record)
            return version, await self._push(record, known)

    async def serve_again(self, version: int) -> list[PushResult]:
        """Serve a known version everywhere, under its own number. Raises ApiError 404 for an unknown one."""
        async with self._pushing:
            known = {record.version: record for record in await self.all()}
            record = known.get(version)
            if record is None or record.location is None:
                raise ApiError(404, f"no published policy has version {version}")
            return await self._push(record, known, force=True)

    async def _push(
        self, record: PolicyRecord, known: dict[int, PolicyRecord], force: bool = False
    ) -> list[PushResult]:
        self.target = record.version
        servers = list(self._fleet.servers.values())
        results = await asyncio.gather(*(self._reload(server, record, force) for server in servers))
        if results and not any(result.ok for result in results):
            await self._store(msgspec.structs.replace(record, state="failed"))
            logger.error("version %d was refused by every server", record.version)
            return results
        former = known.get(self._fleet.serving) if self._fleet.serving is not None else None
        if former is not None and former.version != record.version:
            await self._store(msgspec.structs.replace(former, state="retired"))
        await self._store(msgspec.structs.replace(record, state="serving"))
        await _stored(self._redis.set(keys.SERVING, record.version))
        self._fleet.serving = record.version
        logger.info("version %d is served by %s", record.version, [r.server for r in results if r.ok])
        return results

    async def _reload(self, server: RolloutServer, record: PolicyRecord, force: bool) -> PushResult:
        started = time.monotonic()
        if server.registration.url is None:
            error = "a bare engine takes no policy: put a rollout server in front of it"
            return PushResult(server=server.id, ok=False, total_s=0.0, error=error)
        body = {
            "version": record.version,
            "location": record.location,
            "manifest_sha256": record.manifest_sha256,
            "force": force,
        }
        try:
            status, reply = await self._fleet.engine.post_json(
                f"{server.registration.url}/reload", body, self._push_timeout_s, self._fleet.headers
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            total_s = time.monotonic() - started
            return PushResult(
                server=server.id, ok=False, total_s=total_s, error=f"{type(error).__name__}: {error}"
            )
        total_s = time.monotonic() - started
        if status != 200 or not reply.get("ok"):
            return PushResult(server=server.id, ok=False, total_s=total_s, error=_message(reply))
        server.version = reply["version"]
        return PushResult(
            server=server.id,
            ok=True,
            version_served=reply["version"],
            paused_s=reply.get("paused_s"),
            total_s=total_s,
        )

    async def _store(self, record: PolicyRecord) -> None:
        stored = msgspec.json.encode(record).decode()
        await _stored(self._redis.hset(keys.POLICIES, str(record.version), stored))


def status_of(results: Sequence[PushResult]) -> int:
    """200 when every server took it, 207 when one failed."""
    return 200 if all(result.ok for result in results) else 207


def _message(reply: Any) -> str:
    error = reply.get("error") if isinstance(reply, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(reply)


async def _stored(call: Any) -> Any:
    try:
        return await call
    except (RedisError, OSError) as error:
        raise StorageUnavailable(f"Redis: {error}") from error
