"""The version numbers of policies: the trainer reserves them, a gateway registers and serves them.

trainer  ── RESERVE ──▶ weir:policy_reserved ─┐
gateway  ── look ◀────────────────────────────┴─ weir:policies ◀── REGISTER, unless one changed since `look`
gateway  ── REMOVE ──▶ weir:policies_removed, unless the version is needed

The scripts together keep one invariant: a version number names one set of weights. RESERVE
(`consumer_scripts.py`) reserves a number only if it is higher than every registered or reserved one; REGISTER
stores nothing if a version was registered or reserved since its caller looked.

Adapters that are policies of their own have a table of their own. Its revision grows with each change, also
after a loss of Redis, because it is at least the time in milliseconds.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.published_policy import PolicyRecord, PublishedAdapter
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.lua import Argument, Confirm, Script, unconfirmed

REGISTER = Script[int]("""
-- KEYS: policies, reserved
-- ARGV: version, record; and as the caller has read them: number of policies, record of this version,
--       reserved version
-- Returns 1 if the policy is registered, 0 if anything has changed since the caller read it.
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[3]) then return 0 end
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[4] then return 0 end
if (redis.call('HGET', KEYS[2], 'version') or '') ~= ARGV[5] then return 0 end
redis.call('HDEL', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
""")

REGISTER_AGAIN = Script[int]("""
-- KEYS: policies, serving plan   ARGV: version, plan, record
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] then return 0 end
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[3])
return 1
""")

STORE = Script[int]("""
-- KEYS: policies   ARGV: version, record
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
""")

REMOVE = Script[int]("""
-- KEYS: policies, serving plan, removed   ARGV: version, plan
-- Returns 1 if the version is removed. The newest version stays, because its number is never given again.
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] then return 0 end
local newer = false
for _, version in ipairs(redis.call('HKEYS', KEYS[1])) do -- bounded: versions whose files are there
    newer = newer or tonumber(version) > tonumber(ARGV[1])
end
if not newer then return 0 end
if redis.call('HDEL', KEYS[1], ARGV[1]) == 1 then redis.call('SADD', KEYS[3], ARGV[1]) end
if redis.call('SCARD', KEYS[3]) > 2000 then -- of older ones nobody asks
    for _, version in ipairs(redis.call('SMEMBERS', KEYS[3])) do -- bounded: 2001
        if tonumber(version) <= tonumber(ARGV[1]) - 1000 then redis.call('SREM', KEYS[3], version) end
    end
end
return 1
""")

FORGET = Script[None]("""
-- KEYS: policies   ARGV: version, record
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
""")


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

    def __init__(self, redis: Redis, confirm: Confirm | None = None) -> None:
        """`redis` returns bytes (decode_responses off)."""
        self._redis, self._confirm = redis, confirm or unconfirmed(redis)

    async def records(self) -> Mapping[int, PolicyRecord]:
        """Every registered policy by its version, in no order."""
        return _records(await stored(self._redis.hgetall(key_names.POLICIES)))

    async def record(self, version: int) -> PolicyRecord | None:
        packed = await stored(self._redis.hget(key_names.POLICIES, str(version)))
        return None if packed is None else msgspec.json.decode(packed, type=PolicyRecord)

    async def look(self) -> KnownPolicies:
        policies = await stored(self._redis.hgetall(key_names.POLICIES))
        reserved = await stored(self._redis.hgetall(key_names.RESERVED))
        return KnownPolicies(_records(policies), _reserved(reserved), policies, reserved)

    async def register(self, record: PolicyRecord, known: KnownPolicies) -> bool:
        """Store the policy under its version. If `known` is out of date, store nothing and return False."""
        name = str(record.version)
        arguments: list[Argument] = [name, _packed(record), len(known.packed)]
        arguments += [known.packed.get(name.encode(), b""), known.packed_reserved.get(b"version", b"")]
        return bool(await self._confirm(REGISTER, [key_names.POLICIES, key_names.RESERVED], arguments))

    async def register_first(self, record: PolicyRecord) -> None:
        """Register the version that the engines started with, unless it is known."""
        await stored(self._redis.hsetnx(key_names.POLICIES, str(record.version), _packed(record)))

    async def register_again(self, record: PolicyRecord, plan: bytes) -> bool:
        """Register a version that Redis has lost, while the serving plan is `plan`, which wants it. Returns
        whether it is registered."""
        arguments: list[Argument] = [str(record.version), plan, _packed(record)]
        named: list[str] = [key_names.POLICIES, key_names.SERVING]
        return bool(await self._confirm(REGISTER_AGAIN, named, arguments))

    async def store(self, record: PolicyRecord) -> None:
        """Replace what is stored under the policy's version, if it is still registered."""
        await self._confirm(STORE, [key_names.POLICIES], [str(record.version), _packed(record)])

    async def remove(self, version: int, plan: bytes) -> bool:
        """Remove a version whose files are to be removed, unless it is the newest one, or the serving plan is
        not `plan` any more. Returns whether it is removed."""
        arguments: list[Argument] = [str(version), plan]
        named: list[str] = [key_names.POLICIES, key_names.SERVING, key_names.REMOVED]
        return bool(await self._confirm(REMOVE, named, arguments))

    async def was_removed(self, version: int) -> bool:
        return bool(await stored(self._redis.sismember(key_names.REMOVED, str(version))))

    async def forget(self, record: PolicyRecord) -> None:
        """Free the number of a version that no server has loaded, unless its record has changed."""
        await self._confirm(FORGET, [key_names.POLICIES], [str(record.version), _packed(record)])


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


REVISE = """
local function revise(key, now_ms)
    local revision = math.max(tonumber(redis.call('GET', key) or 0) + 1, tonumber(now_ms))
    redis.call('SET', key, string.format('%.0f', revision))
end
"""

ADD = Script[int](
    REVISE
    + """
-- KEYS: adapters, their last versions, revision
-- ARGV: field, record, name, version, most adapters, now in ms, whether it may come back
-- An adapter that may come back has no last version: its name, a model's, would stay for ever.
-- Returns 1 if it is added, 0 if the version is not above the last one of the name, -1 if there are too
-- many.
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then return -1 end
local last = tonumber(redis.call('HGET', KEYS[2], ARGV[3]) or -1)
if last >= tonumber(ARGV[4]) and ARGV[7] == '0' then return 0 end
redis.call('HDEL', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[7] == '0' then redis.call('HSET', KEYS[2], ARGV[3], math.max(last, tonumber(ARGV[4]))) end
revise(KEYS[3], ARGV[6])
return 1
"""
)

REMOVE_ADAPTER = Script[int](
    REVISE
    + """
-- KEYS: adapters, revision   ARGV: field, now in ms
local removed = redis.call('HDEL', KEYS[1], ARGV[1])
if removed == 1 then revise(KEYS[2], ARGV[2]) end
return removed
"""
)


Added = Literal["added", "taken", "full"]


class AdapterRegister:
    """The gateways' access to the adapters. Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis, confirm: Confirm | None = None) -> None:
        """`redis` returns bytes (decode_responses off)."""
        self._redis, self._confirm = redis, confirm or unconfirmed(redis)

    async def read(self) -> tuple[int, Sequence[PublishedAdapter]]:
        """The revision, and every adapter by name and version."""
        async with self._redis.pipeline(transaction=True) as reading:
            reading.get(key_names.ADAPTERS_REVISION)
            reading.hvals(key_names.ADAPTERS)
            revision, packed = await stored(reading.execute())
        found = [msgspec.json.decode(each, type=PublishedAdapter) for each in packed]
        return int(revision or 0), sorted(found, key=lambda each: (each.name, each.version))

    async def next_version(self, name: str) -> int:
        """The version after every one that the name has had; the first one is 1."""
        return int(await stored(self._redis.hget(key_names.ADAPTER_VERSIONS, name)) or 0) + 1

    async def add(self, adapter: PublishedAdapter, most: int) -> Added:
        """Add an adapter, unless its name has had this version or a later one, or there are `most`."""
        now_ms = int(clock.now() * 1000)
        packed = msgspec.json.encode(adapter)
        arguments: list[Argument] = [adapter.field, packed, adapter.name, adapter.version]
        arguments += [most, now_ms, int(adapter.passing)]
        named: list[str] = [key_names.ADAPTERS, key_names.ADAPTER_VERSIONS, key_names.ADAPTERS_REVISION]
        answer = await self._confirm(ADD, named, arguments)
        return "added" if answer == 1 else "taken" if answer == 0 else "full"

    async def remove(self, adapter: PublishedAdapter) -> bool:
        """Remove an adapter. Returns whether it was there."""
        arguments: list[Argument] = [adapter.field, int(clock.now() * 1000)]
        named: list[str] = [key_names.ADAPTERS, key_names.ADAPTERS_REVISION]
        return bool(await self._confirm(REMOVE_ADAPTER, named, arguments))
