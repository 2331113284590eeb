"""The registrations of rollout servers in Redis: written by the gateway that a server calls, read by all.

Each server registers every few seconds. Such a renewal changes only a time, so the other gateways need not
read all registrations again: they do so after a change, and now and then.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.engines.fleet_server import Registration
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.ids import new_id
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

logger = logging.getLogger(__name__)

WHOLE_EVERY_S = 10.0
"""How often all registrations are read although nothing says that they changed: gateways of an earlier
version do not say so, and the times in them change."""

_registration = msgspec.json.Decoder(Registration)


@dataclass(frozen=True)
class ReadFleet:
    """What Redis says of the fleet."""

    registrations: Mapping[str, Registration]
    """By id, as they were at `read_at`."""
    read_at: float
    """Seconds since the epoch."""
    fresh: bool
    """The registrations were read now."""
    serving: bytes | None
    """The plan, packed."""
    drained: frozenset[str]
    loading: frozenset[str]


class KnownRegistrations:
    """Reads the registrations when they have changed."""

    def __init__(self) -> None:
        self._known: dict[str, Registration] = {}
        self._change: bytes | None = None
        self._read_at = 0.0

    async def read(self, redis: Redis) -> ReadFleet:
        """Raises StorageUnavailable."""
        now = clock.now()
        async with redis.pipeline(transaction=False) as reading:
            reading.get(keys.SERVERS_CHANGED)
            reading.get(keys.SERVING)
            reading.smembers(keys.HELD)
            reading.smembers(keys.LOADING)
            change, serving, drained, loading = await stored(reading.execute())
        fresh = change is None or change != self._change or not 0 <= now - self._read_at < WHOLE_EVERY_S
        if fresh:
            found = (await stored(redis.hgetall(keys.SERVERS))).values()
            self._known = {each.id: each for each in map(_registration.decode, found)}
            self._change, self._read_at = change, now
        return ReadFleet(self._known, self._read_at, fresh, serving, _names(drained), _names(loading))


async def renewed(redis: Redis, registration: Registration) -> Registration | None:
    """The registration with the time of now, if the same process has registered the same addresses; None if
    it has not, so that other servers have to be looked at. Raises StorageUnavailable."""
    raw = await stored(redis.hget(keys.SERVERS, registration.id))
    if raw is None:
        return None
    known = _registration.decode(raw)
    if not registration.renews(known):
        return None
    stamped = msgspec.structs.replace(registration, registered_at=clock.now(), displaced=known.displaced)
    await stored(redis.hset(keys.SERVERS, stamped.id, msgspec.json.encode(stamped).decode()))
    return stamped


async def write_registration(redis: Redis, registration: Registration) -> Registration:
    """Store a new registration, or another one for a known id, with the time of now. Raises
    StorageUnavailable."""
    stamped = msgspec.structs.replace(registration, registered_at=clock.now())
    async with redis.pipeline(transaction=False) as writing:
        writing.hset(keys.SERVERS, stamped.id, msgspec.json.encode(stamped).decode())
        writing.set(keys.SERVERS_CHANGED, new_id())  # after the change, so that its readers see the change
        await stored(writing.execute())
    return stamped


async def remove_registration(redis: Redis, server_id: str) -> bool:
    """Returns whether it was there. Raises StorageUnavailable."""
    async with redis.pipeline(transaction=False) as writing:
        writing.hdel(keys.SERVERS, server_id)
        writing.set(keys.SERVERS_CHANGED, new_id())
        removed, _ = await stored(writing.execute())
    return bool(removed)


@asynccontextmanager
async def noted_as_loading(redis: Redis, server_id: str) -> AsyncIterator[None]:
    """Let all gateways ask often for the server's state while it loads a version in the block."""
    await _note(redis.sadd, server_id)
    try:
        yield
    finally:
        await _note(redis.srem, server_id)


async def _note(change: Callable[[str, str], Any], server_id: str) -> None:
    try:
        await stored(change(keys.LOADING, server_id))
    except StorageUnavailable as error:
        logger.warning("gateways learn late whether server %s loads a version: %s", server_id, error)


def _names(members: set[bytes]) -> frozenset[str]:
    return frozenset(member.decode() for member in members)
