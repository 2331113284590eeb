"""The adapters that are policies of their own, in Redis."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.policies.adapter import PublishedAdapter
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.connection.replicas import Argument, Confirm, unconfirmed
from rollout_queue.redis.scripts import adapters as scripts

Added = Literal["added", "taken", "full"]


class AdapterRegister:
    """The gateways' access to the adapters. Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis, confirm: Confirm = unconfirmed) -> None:
        """`redis` returns bytes (decode_responses off)."""
        self._redis, self._confirm = redis, confirm
        self._add = redis.register_script(scripts.ADD)
        self._remove = redis.register_script(scripts.REMOVE)

    async def read(self) -> tuple[int, Sequence[PublishedAdapter]]:
        """The revision, and every adapter by name and version."""
        async with self._redis.pipeline(transaction=True) as reading:
            reading.get(keys.ADAPTERS_REVISION)
            reading.hvals(keys.ADAPTERS)
            revision, packed = await stored(reading.execute())
        found = [msgspec.json.decode(each, type=PublishedAdapter) for each in packed]
        return int(revision or 0), sorted(found, key=lambda each: (each.name, each.version))

    async def next_version(self, name: str) -> int:
        """The version after every one that the name has had; the first one is 1."""
        return int(await stored(self._redis.hget(keys.ADAPTER_VERSIONS, name)) or 0) + 1

    async def add(self, adapter: PublishedAdapter, most: int) -> Added:
        """Add an adapter, unless its name has had this version or a later one, or there are `most`."""
        now_ms = int(clock.now() * 1000)
        packed = msgspec.json.encode(adapter)
        arguments: list[Argument] = [adapter.field, packed, adapter.name, adapter.version]
        arguments += [most, now_ms, int(adapter.passing)]
        named: list[str] = [keys.ADAPTERS, keys.ADAPTER_VERSIONS, keys.ADAPTERS_REVISION]
        answer = await self._confirm(self._add, named, arguments)
        return "added" if answer == 1 else "taken" if answer == 0 else "full"

    async def remove(self, adapter: PublishedAdapter) -> bool:
        """Remove an adapter. Returns whether it was there."""
        arguments: list[Argument] = [adapter.field, int(clock.now() * 1000)]
        return bool(await self._confirm(self._remove, [keys.ADAPTERS, keys.ADAPTERS_REVISION], arguments))
