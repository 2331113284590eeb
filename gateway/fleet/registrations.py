"""The registrations of rollout servers in Redis: written by the gateway that a server calls, read by all.

Each server registers every few seconds. Such a renewal changes only a time, so the other gateways need not
read all registrations again: they do so after a change, and now and then.
"""

import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.fleet.fleet_server import FleetServer, Registration
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.ids import new_id
from rollout_queue.contract.serving_plan import ServingPlan, plan_of
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.losses import note_loss_async
from rollout_queue.redis.plan_store import ServingRegister

logger = logging.getLogger(__name__)

WHOLE_EVERY_S = 10.0
"""How often all registrations are read although nothing says that they changed: gateways of an earlier
version do not say so, and the times in them change."""

LASTING = (key_names.SERVERS, key_names.SERVING, key_names.HELD)
MARK = ""
"""A member of the set of drained servers that is no server."""

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
    plan: ServingPlan
    drained: frozenset[str]
    loading: frozenset[str]


class KnownRegistrations:
    """Reads the registrations when they have changed."""

    def __init__(self) -> None:
        self._known: dict[str, Registration] = {}
        self._change: bytes | None = None
        self._read_at = 0.0
        self._had_secret = False
        """Whether Redis had a secret at an earlier reading."""

    async def read(self, redis: Redis, plan: ServingPlan, servers: Collection[FleetServer]) -> ReadFleet:
        """What Redis says. What it has lost is written again, as `plan` and `servers` have it, which are as
        they were read last. Raises StorageUnavailable."""
        now = clock.now()
        # What existed is read first: Redis may be emptied meanwhile, and healed by another gateway.
        async with redis.pipeline(transaction=False) as reading:
            reading.exists(key_names.SECRET)
            for key in LASTING:
                reading.sismember(key_names.LASTING, key)
            reading.get(key_names.SERVERS_CHANGED)
            reading.get(key_names.SERVING)
            reading.smembers(key_names.HELD)
            reading.smembers(key_names.LOADING)
            secret, *named, change, serving, drained, loading = await stored(reading.execute())
        emptied = self._had_secret and not secret  # nobody has done it on purpose
        lost = {key for key, existed in zip(LASTING, named, strict=True) if emptied or existed}
        fresh = change is None or change != self._change or not 0 <= now - self._read_at < WHOLE_EVERY_S
        if fresh:
            found = (await stored(redis.hgetall(key_names.SERVERS))).values()
            # Each removal leaves a new id in SERVERS_CHANGED.
            if found or change not in (None, self._change) or not (self._known and key_names.SERVERS in lost):
                self._known = {each.id: each for each in map(_registration.decode, found)}
            else:
                await self._write_again(redis)
            self._change, self._read_at = change, now
        serves = plan_of(serving)
        gone = serving is None and plan != serves and key_names.SERVING in lost
        if gone or (serving is not None and serves.newest_id < plan.newest_id):
            serves = await self._write_plan_again(redis, plan, lost=gone)
        held = _names(drained) - {MARK}
        if not drained and key_names.HELD in lost:
            held = await self._write_drained_again(redis, servers)
        self._had_secret |= bool(secret)
        return ReadFleet(self._known, self._read_at, fresh, serves, held, _names(loading))

    async def _write_again(self, redis: Redis) -> None:
        """Store the registrations that Redis has lost, so that their servers get calls meanwhile: they
        register only every few seconds."""
        async with redis.pipeline(transaction=False) as writing:
            for server_id, registration in self._known.items():
                writing.hsetnx(key_names.SERVERS, server_id, msgspec.json.encode(registration).decode())
            if any(await stored(writing.execute())):
                again = f"a gateway has written the {len(self._known)} servers again"
                said = f"{key_names.SERVERS} was gone: {again}"
                await note_loss_async(redis, key_names.SERVERS, said)

    async def _write_drained_again(self, redis: Redis, servers: Iterable[FleetServer]) -> frozenset[str]:
        """Note again which servers are drained. Returns them."""
        drained = [server.id for server in servers if server.drained]
        if drained and await stored(redis.sadd(key_names.HELD, MARK, *drained)):
            again = f"a gateway has noted the drained servers again: {', '.join(drained)}"
            said = f"{key_names.HELD} was gone: {again}"
            await note_loss_async(redis, key_names.HELD, said)
        return frozenset(drained)

    async def _write_plan_again(self, redis: Redis, plan: ServingPlan, *, lost: bool) -> ServingPlan:
        """Store the plan if Redis has lost it (nothing removes it), or has an older one after a failover.
        Returns the plan that Redis has now."""
        if not lost:
            plan = await ServingRegister(redis, known=lambda: plan).change(lambda known: known)
            said = f"{key_names.SERVING} was older than a gateway knew, and is written again as it was"
            await note_loss_async(redis, key_names.SERVING, said)
        elif await stored(redis.set(key_names.SERVING, msgspec.json.encode(plan), nx=True)):
            said = f"{key_names.SERVING} was gone: a gateway has written the serving plan again, as it was"
            await note_loss_async(redis, key_names.SERVING, said)
        return plan


async def set_held(redis: Redis, server_ids: Collection[str], *, drained: bool) -> None:
    """Note that an operator has taken servers out of rotation, or put them back. MARK stays in the set, so
    that it never vanishes by itself. Raises StorageUnavailable."""
    await stored(redis.sadd(key_names.HELD, MARK, *(server_ids if drained else ())))
    if not drained:
        await stored(redis.srem(key_names.HELD, *server_ids))


async def renewed(redis: Redis, registration: Registration) -> Registration | None:
    """The registration with the time of now, if the same process has registered the same addresses; None if
    it has not, so that other servers have to be looked at. Raises StorageUnavailable."""
    raw = await stored(redis.hget(key_names.SERVERS, registration.id))
    if raw is None:
        return None
    known = _registration.decode(raw)
    if not registration.renews(known):
        return None
    stamped = msgspec.structs.replace(registration, registered_at=clock.now(), displaced=known.displaced)
    await stored(redis.hset(key_names.SERVERS, stamped.id, msgspec.json.encode(stamped).decode()))
    return stamped


async def write_registration(redis: Redis, registration: Registration) -> Registration:
    """Store a new registration, or another one for a known id, with the time of now. Raises
    StorageUnavailable."""
    stamped = msgspec.structs.replace(registration, registered_at=clock.now())
    async with redis.pipeline(transaction=False) as writing:
        writing.hset(key_names.SERVERS, stamped.id, msgspec.json.encode(stamped).decode())
        writing.set(key_names.SERVERS_CHANGED, new_id())  # after the change, so that its readers see that
        await stored(writing.execute())
    return stamped


async def remove_registration(redis: Redis, server_id: str) -> bool:
    """Returns whether it was there. Raises StorageUnavailable."""
    async with redis.pipeline(transaction=False) as writing:
        writing.hdel(key_names.SERVERS, server_id)
        writing.set(key_names.SERVERS_CHANGED, new_id())
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
        await stored(change(key_names.LOADING, server_id))
    except StorageUnavailable as error:
        logger.warning("gateways learn late whether server %s loads a version: %s", server_id, error)


def _names(members: set[bytes]) -> frozenset[str]:
    return frozenset(member.decode() for member in members)
