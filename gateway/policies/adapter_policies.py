"""LoRA adapters that are policies of their own: published by operators, and called as `policy:name@version`.

POST /admin/adapters ─▶ Redis ─▶ POST /adapters on every live rollout server ─▶ one result per server
                          └─▶ each registration of a server ─▶ it loads what it lacks
"""

import asyncio
from collections.abc import Sequence

import aiohttp
from redis.asyncio import Redis

from gateway.errors import ObjectNotFound, StateConflict
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer
from rollout_queue import clock
from rollout_queue.contract.published_policy import PublishedAdapter
from rollout_queue.protocol.message import MalformedMessage, error_message
from rollout_queue.protocol.rollout_server_messages import (
    AdapterResult,
    LoadedAdapters,
    WantedAdapter,
    WantedAdapters,
)
from rollout_queue.redis.policy_register import AdapterRegister


class AdapterPolicies:
    """Every method may raise StorageUnavailable."""

    def __init__(self, redis: Redis, fleet: Fleet, most: int, timeout_s: float) -> None:
        """`most`: how many adapters there may be. `timeout_s` bounds the load on one server."""
        self._register = AdapterRegister(redis, fleet.confirm)
        self._fleet, self._most, self._timeout_s = fleet, most, timeout_s

    async def all(self) -> Sequence[PublishedAdapter]:
        """Every adapter, by name and version."""
        return (await self._register.read())[1]

    async def wanted(self) -> WantedAdapters:
        """What every rollout server is to have."""
        revision, adapters = await self._register.read()
        found = (
            WantedAdapter(
                policy=each.name,
                version=each.version,
                location=each.location,
                manifest_sha256=each.manifest_sha256,
            )
            for each in adapters
        )
        return WantedAdapters(revision=revision, adapters=tuple(found))

    async def version_of(self, name: str, version: int | None) -> int:
        """The version that a call means: the newest one if it names none. Raises ObjectNotFound."""
        known = [each.version for each in await self.all() if each.name == name]
        if version is None and known:
            return known[-1]
        if version in known:
            return version
        named = f"{name}@{version}" if version is not None else name
        raise ObjectNotFound(f"there is no adapter {named}", param="model", code="model_not_found")

    async def publish(
        self,
        name: str,
        version: int | None,
        location: str,
        manifest_sha256: str | None,
        *,
        passing: bool = False,
    ) -> tuple[PublishedAdapter, Sequence[AdapterResult]]:
        """Add an adapter, and have every live server load it. If all of them refuse, it is removed again.

        Raises StateConflict for a version that the name has had, and if there are too many adapters.
        """
        adapter = PublishedAdapter(
            name=name,
            version=await self._register.next_version(name) if version is None else version,
            location=location,
            manifest_sha256=manifest_sha256,
            created_at=clock.now(),
            passing=passing,
        )
        known = next((each for each in await self.all() if each.field == adapter.field), None)
        new = known is None or (known.location, known.manifest_sha256) != (location, manifest_sha256)
        if new:
            await self._add(adapter)
        results = await self._spread(adapter)
        if new and results and not any(result.ok for result in results):
            await self._register.remove(adapter)
        return adapter, results

    async def ensure(self, adapter: PublishedAdapter) -> None:
        """Publish a passing adapter again, if it has made room for others. Raises as `publish`."""
        if any(each.field == adapter.field for each in await self.all()):
            return
        await self.publish(
            adapter.name, adapter.version, adapter.location, adapter.manifest_sha256, passing=True
        )

    async def remove(self, name: str, version: int) -> None:
        """Remove an adapter: no call can name it any more. Raises ObjectNotFound."""
        for adapter in await self.all():
            if (adapter.name, adapter.version) == (name, version) and await self._register.remove(adapter):
                await self._spread(adapter)
                return
        raise ObjectNotFound(f"there is no adapter {name}@{version}")

    async def _add(self, adapter: PublishedAdapter) -> None:
        while (added := await self._register.add(adapter, self._most)) == "full":
            passing = [each for each in await self.all() if each.passing]
            if not passing:
                break
            await self._register.remove(min(passing, key=lambda each: each.created_at))
        if added == "taken":
            why = f"{adapter.name} has had version {adapter.version}, or a later one"
            raise StateConflict(why, param="version")
        if added == "full":
            raise StateConflict(f"there are {self._most} adapters (gateway.max_adapters); remove one first")

    async def _spread(self, adapter: PublishedAdapter) -> Sequence[AdapterResult]:
        """Tell every live server what it is to have. Returns what became of this adapter on each."""
        wanted = await self.wanted()
        live = [server for server in self._fleet.rollout_servers if server.live]
        results = await asyncio.gather(*(self._tell(server, wanted, adapter) for server in live))
        await self._fleet.refresh()  # from now on, calls go to the servers that have it
        return results

    async def _tell(
        self, server: FleetServer, wanted: WantedAdapters, adapter: PublishedAdapter
    ) -> AdapterResult:
        url, engine = f"{server.registration.url}/adapters", self._fleet.engine
        try:
            status, body = await engine.post(url, wanted, self._timeout_s, self._fleet.headers)
            if status != 200:
                return AdapterResult(server=server.id, ok=False, error=error_message(body))
            said = LoadedAdapters.read(body).results
        except (aiohttp.ClientError, TimeoutError, OSError, MalformedMessage) as error:
            return AdapterResult(server=server.id, ok=False, error=f"{type(error).__name__}: {error}")
        for each in said:
            if (each.policy, each.version) == (adapter.name, adapter.version):
                return AdapterResult(server=server.id, ok=each.ok, error=each.error, refused=each.refused)
        return AdapterResult(server=server.id, ok=False, error="another change has replaced this one")
