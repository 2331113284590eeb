"""The version numbers of policies: the trainer reserves them, a gateway registers and serves them.

trainer  ── RESERVE ──▶ weir:policy_reserved ─┐
gateway  ── look ◀────────────────────────────┴─ weir:policies ◀── REGISTER, unless one changed since `look`
gateway  ── REMOVE ──▶ weir:policies_removed, unless the version is needed
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import msgspec
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from rollout_queue.contract.policies.policy import PolicyRecord
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.client.replication import Replication
from rollout_queue.redis.connection.replicas import Argument, Confirm, RunScript, confirmed_now, unconfirmed
from rollout_queue.redis.scripts import policies as policy_scripts


class ReservedVersions(NamedTuple):
    """The numbers that the trainer has reserved for steps. It may have begun the next steps while it writes a
    version."""

    version: int = -1
    """The highest number."""
    locations: Mapping[int, str] = {}
    """Where the weights of the last numbers lie, or will lie."""


class KnownPolicies(NamedTuple):
    """The policies and the reservations as read, with their bytes, which `register` compares."""

    records: Mapping[int, PolicyRecord]
    reserved: ReservedVersions
    packed: Mapping[bytes, bytes]
    packed_reserved: Mapping[bytes, bytes]

    @property
    def newest(self) -> int:
        """The highest registered version; 0 if there is none."""
        return max(self.records, default=0)

    @property
    def reserved_ahead(self) -> int | None:
        """The highest reserved number, if it is above every registered version."""
        return self.reserved.version if self.reserved.version > self.newest else None

    @property
    def next_free(self) -> int:
        """The number after every registered and reserved one."""
        return max(self.newest, self.reserved.version) + 1


class PolicyRegister:
    """The gateways' end of the register. Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis, confirm: Confirm = unconfirmed) -> None:
        """`redis` returns bytes (decode_responses off)."""
        self._redis, self._confirm = redis, confirm
        self._register = redis.register_script(policy_scripts.REGISTER)
        self._register_again = redis.register_script(policy_scripts.REGISTER_AGAIN)
        self._store = redis.register_script(policy_scripts.STORE)
        self._remove = redis.register_script(policy_scripts.REMOVE)
        self._forget = redis.register_script(policy_scripts.FORGET)

    async def records(self) -> Mapping[int, PolicyRecord]:
        """Every registered policy by its version, in no order."""
        return _records(await stored(self._redis.hgetall(keys.POLICIES)))

    async def record(self, version: int) -> PolicyRecord | None:
        packed = await stored(self._redis.hget(keys.POLICIES, str(version)))
        return None if packed is None else msgspec.json.decode(packed, type=PolicyRecord)

    async def look(self) -> KnownPolicies:
        policies = await stored(self._redis.hgetall(keys.POLICIES))
        reserved = await stored(self._redis.hgetall(keys.RESERVED))
        return KnownPolicies(_records(policies), _reserved(reserved), policies, reserved)

    async def register(self, record: PolicyRecord, known: KnownPolicies) -> bool:
        """Store the policy under its version. If `known` is out of date, store nothing and return False."""
        name = str(record.version)
        arguments: list[Argument] = [name, _packed(record), len(known.packed)]
        arguments += [known.packed.get(name.encode(), b""), known.packed_reserved.get(b"version", b"")]
        return bool(await self._confirm(self._register, [keys.POLICIES, keys.RESERVED], arguments))

    async def register_first(self, record: PolicyRecord) -> None:
        """Register the version that the engines started with, unless it is known."""
        await stored(self._redis.hsetnx(keys.POLICIES, str(record.version), _packed(record)))

    async def register_again(self, record: PolicyRecord, plan: bytes) -> bool:
        """Register a version that Redis has lost, while the serving plan is `plan`, which wants it. Returns
        whether it is registered."""
        arguments: list[Argument] = [str(record.version), plan, _packed(record)]
        return bool(await self._confirm(self._register_again, [keys.POLICIES, keys.SERVING], arguments))

    async def store(self, record: PolicyRecord) -> None:
        """Replace what is stored under the policy's version, if it is still registered."""
        await self._confirm(self._store, [keys.POLICIES], [str(record.version), _packed(record)])

    async def remove(self, version: int, plan: bytes) -> bool:
        """Remove a version whose files are to be removed, unless it is the newest one, or the serving plan is
        not `plan` any more. Returns whether it is removed."""
        arguments: list[Argument] = [str(version), plan]
        named: list[str] = [keys.POLICIES, keys.SERVING, keys.REMOVED]
        return bool(await self._confirm(self._remove, named, arguments))

    async def was_removed(self, version: int) -> bool:
        return bool(await stored(self._redis.sismember(keys.REMOVED, str(version))))

    async def forget(self, record: PolicyRecord) -> None:
        """Free the number of a version that no server has loaded, unless its record has changed."""
        await self._confirm(self._forget, [keys.POLICIES], [str(record.version), _packed(record)])


def reserving(redis: BlockingRedis, replication: Replication) -> RunScript:
    """Runs the script RESERVE, and returns once replicas have the reservation."""
    return partial(confirmed_now, redis, replication, redis.register_script(policy_scripts.RESERVE))


def reserve_arguments(version: int, location: str) -> tuple[list[str], list[str | int]]:
    """Keys and arguments of the script RESERVE, except the fence and the token, which come first."""
    return [keys.RESERVED, keys.POLICIES], [version, location]


def _records(packed: Mapping[bytes, bytes]) -> dict[int, PolicyRecord]:
    records = (msgspec.json.decode(value, type=PolicyRecord) for value in packed.values())
    return {record.version: record for record in records}


def _reserved(packed: Mapping[bytes, bytes]) -> ReservedVersions:
    if not packed:
        return ReservedVersions()
    newest = int(packed[b"version"])
    earlier = {int(name): location.decode() for name, location in packed.items() if name.isdigit()}
    return ReservedVersions(newest, {**earlier, newest: packed[b"location"].decode()})


def _packed(record: PolicyRecord) -> str:
    return msgspec.json.encode(record).decode()
