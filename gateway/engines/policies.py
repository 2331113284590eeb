"""Publishes policies: registers each version, and pushes it to every rollout server.

POST /admin/policies ──▶ record ──▶ POST /reload on each server ──▶ serving = version, once one has loaded it

To push a policy is to have the servers load it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

import aiohttp
import msgspec
from pydantic import ValidationError
from redis.asyncio import Redis

from gateway.engines.fleet import Fleet
from gateway.engines.fleet_server import FleetServer
from gateway.errors import ObjectNotFound, StateConflict
from rollout_queue.contract.policy import PolicyRecord
from rollout_queue.protocol.errors import error_message
from rollout_queue.protocol.message import MalformedMessage, first_fault
from rollout_queue.protocol.policies import PushResult
from rollout_queue.protocol.reload import ReloadBody, Reloaded
from rollout_queue.redis.policies import KnownPolicies, PolicyRegister

logger = logging.getLogger(__name__)


class ReloadRefused(Exception):
    """A server did not load a version, or did not confirm that it did; the text says why."""


class Policies:
    """The registered versions, and their push to the fleet. One push at a time."""

    def __init__(self, redis: Redis, fleet: Fleet, push_timeout_s: float) -> None:
        self._register = PolicyRegister(redis)
        self._fleet = fleet
        self._push_timeout_s = push_timeout_s
        self._pushing = asyncio.Lock()
        self.target: int | None = None
        """The version of the current push, or of the last one."""

    async def all(self) -> list[PolicyRecord]:
        """Every known version, ascending. Raises StorageUnavailable."""
        known = await self._register.records()
        return [known[version] for version in sorted(known)]

    async def current(self) -> PolicyRecord | None:
        """The policy that servers are to serve; None before the first one."""
        known = {record.version: record for record in await self.all()}
        return known.get(self._fleet.serving) if self._fleet.serving is not None else None

    async def note_initial(self, version: int) -> None:
        """Register the version that the engines started with; serve it if none is served yet."""
        record = PolicyRecord(version=version, created_at=time.time(), state="serving")
        if await self._register.register_first(record):
            self._fleet.serve(version)

    async def publish(
        self, version: int | None, location: str, manifest_sha256: str | None, step: int | None
    ) -> tuple[int, list[PushResult]]:
        """Register a version and push it. A `version` of None stands for the next free number.

        Raises StateConflict for a number that is lower than the newest, that is registered with other
        content, or that the trainer has reserved for another location.
        """
        async with self._pushing:
            record = await self._registered(version, location, manifest_sha256, step)
            return record.version, await self._push(record)

    async def serve_again(self, version: int) -> list[PushResult]:
        """Push a known version again, under its own number. Raises ObjectNotFound."""
        async with self._pushing:
            record = next((each for each in await self.all() if each.version == version), None)
            if record is None:
                raise ObjectNotFound(f"no policy has version {version}")
            return await self._push(record, force=True)

    async def _registered(
        self, version: int | None, location: str, manifest_sha256: str | None, step: int | None
    ) -> PolicyRecord:
        """Register the policy. Start again if a gateway or the trainer changed the register meanwhile."""
        while True:
            known = await self._register.look()
            asked = PolicyRecord(
                version=max(known.newest, known.reserved.version) + 1 if version is None else version,
                location=location,
                manifest_sha256=manifest_sha256,
                step=step,
                created_at=time.time(),
            )
            record = _accepted(asked, known)
            if await self._register.register(record, known):
                return record

    async def _push(self, record: PolicyRecord, force: bool = False) -> list[PushResult]:
        """Push to every server. The fleet serves the version as soon as one server has loaded it."""
        self.target = record.version
        servers = list(self._fleet.servers.values())
        reloads = [asyncio.create_task(self._reload(server, record, force)) for server in servers]
        try:
            loaded = not servers or await _any_ok(reloads)
            if loaded:
                await self._serve(record)
        finally:
            results = await asyncio.gather(*reloads)
        if not loaded and record.version != self._fleet.serving:
            await self._register.store(msgspec.structs.replace(record, state="failed"))
            logger.error("version %d was refused by every server", record.version)
        return results

    async def _serve(self, record: PolicyRecord) -> None:
        await self._register.store(msgspec.structs.replace(record, state="serving"))
        former = await self._register.serve(record.version)
        self._fleet.serve(record.version)
        logger.info("version %d is served", record.version)
        for each in await self.all():
            if each.version == former != record.version:
                await self._register.store(msgspec.structs.replace(each, state="retired"))

    async def _reload(self, server: FleetServer, record: PolicyRecord, force: bool) -> PushResult:
        started = time.monotonic()
        if server.registration.url is None:
            error = "a bare engine cannot load a policy: put a rollout server in front of it"
            return PushResult(server=server.id, ok=False, total_s=0.0, error=error)
        server.pushing = True
        try:
            served = await self._request_reload(f"{server.registration.url}/reload", record, force)
        except ReloadRefused as refusal:
            total_s = time.monotonic() - started
            return PushResult(server=server.id, ok=False, total_s=total_s, error=str(refusal))
        finally:
            server.pushing = False
        server.has_loaded(served.version)
        return PushResult(
            server=server.id,
            ok=True,
            version_served=served.version,
            paused_s=served.paused_s,
            total_s=time.monotonic() - started,
        )

    async def _request_reload(self, url: str, record: PolicyRecord, force: bool) -> Reloaded:
        """Have the server load the version. Raises ReloadRefused if it does not confirm that it serves it."""
        try:
            asked = ReloadBody(
                version=record.version,
                location=record.location,
                manifest_sha256=record.manifest_sha256,
                force=force,
            )
            headers = self._fleet.headers
            status, body = await self._fleet.engine.post(url, asked, self._push_timeout_s, headers)
        except ValidationError as error:
            raise ReloadRefused(first_fault(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ReloadRefused(f"{type(error).__name__}: {error}") from error
        return _confirmed(status, body, record.version)


def _confirmed(status: int, body: bytes, version: int) -> Reloaded:
    """The server's confirmation that it serves the version. Raises ReloadRefused for any other answer."""
    with suppress(MalformedMessage):
        served = Reloaded.read(body)
        if status == 200 and served.ok and served.version == version:
            return served
    raise ReloadRefused(error_message(body))


async def _any_ok(reloads: Sequence[asyncio.Task[PushResult]]) -> bool:
    """True as soon as one server has loaded the policy; False if all refused it."""
    for reload in asyncio.as_completed(reloads):
        if (await reload).ok:
            return True
    return False


def _accepted(asked: PolicyRecord, known: KnownPolicies) -> PolicyRecord:
    """The record to store. Raises StateConflict if the number is too low, reserved, or has other content."""
    if asked.version < known.newest:
        raise StateConflict(f"version {asked.version} is lower than {known.newest}", param="version")
    registered, reserved = known.records.get(asked.version), known.reserved
    if registered is None:
        # A reserved number may only be published with the location of its reservation.
        if asked.version <= reserved.version and (asked.version, asked.location) != reserved:
            message = f"the trainer has reserved version {reserved.version}, and every lower number"
            raise StateConflict(message, param="version")
        return asked
    if (registered.location, registered.manifest_sha256) != (asked.location, asked.manifest_sha256):
        raise StateConflict(f"version {asked.version} is known with other content", param="version")
    return registered
