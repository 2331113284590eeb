"""The serving plan in Redis, what each server did in the push, and the lease of the gateway that drives it.

gateway ── read ──▶ plan ── change it ──▶ replace, unless another gateway has changed it since ─┐
   ▲                                                                                            │
   └──────────────────────────────────── read again ◀───────────────────────────────────────────┘

A failover of Redis may lose the last changes. Then the plan in Redis is older than the one that a gateway
knows, which counts, and is written again with the next change.

A full Redis refuses a script whose first write is SET or HSET, and accepts DEL and HDEL, so these come first.

Of the canary that is open every gateway notes its own calls and scores, and one reads them all.
"""

import os
import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.serving_plan import (
    Canary,
    CanaryCall,
    CanaryRecord,
    CanaryReport,
    CanaryScore,
    Push,
    ServerPush,
    ServingPlan,
    plan_of,
)
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.lua import Argument, Confirm, Script, unconfirmed

REPLACE = Script[int]("""
-- KEYS: plan, server pushes, pushes, canaries, canary log, canary report
-- ARGV: plan as read or '', new plan, whether a push begins, whether a canary begins, how many pushes and
--       canaries are kept, push that ends or '', canary that ends or ''
-- Returns 1 if the plan is replaced, 0 if it has changed since the caller read it.
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] == '1' then redis.call('DEL', KEYS[2]) end
if ARGV[4] == '1' then redis.call('DEL', KEYS[5], KEYS[6]) end
for place, list in ipairs({KEYS[3], KEYS[4]}) do
    local ended = ARGV[5 + place]
    if ended ~= '' then redis.call('LPUSH', list, ended) end
    redis.call('LTRIM', list, 0, tonumber(ARGV[5]) - 1)
end
return 1
""")

NOTE_SERVERS = Script[None]("""
-- KEYS: server pushes   ARGV: server, server push, …
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], unpack(ARGV)) -- bounded: NOTES servers
""")

HOLD_LEASE = Script[int]("""
-- KEYS: lease   ARGV: token, lease in ms
-- Returns 1 if the caller holds the lease now.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
""")

RELEASE_LEASE = Script[None]("""
-- KEYS: lease   ARGV: token
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
""")


PlanEvent = Callable[[ServingPlan], ServingPlan]
"""A change of the plan."""
PUSHES_KEPT = 100
"""How many ended pushes, and how many ended canaries, are kept."""
NOTES = 200
"""How many servers one script notes."""
REPLACED: list[str] = [
    key_names.SERVING,
    key_names.SERVER_PUSHES,
    key_names.PUSHES,
    key_names.CANARIES,
    key_names.CANARY_LOG,
    key_names.CANARY_REPORT,
]


class ServingRegister:
    """The gateways' access to the plan. Every method raises StorageUnavailable."""

    def __init__(
        self,
        redis: Redis,
        confirm: Confirm | None = None,
        known: Callable[[], ServingPlan] = ServingPlan,
    ) -> None:
        """`redis` returns bytes (decode_responses off); `known` returns the newest plan that the caller has
        seen."""
        self._redis, self._confirm, self._known = redis, confirm or unconfirmed(redis), known

    async def read(self) -> ServingPlan:
        return (await self.read_packed())[0]

    async def read_packed(self) -> tuple[ServingPlan, bytes]:
        """The plan, and its bytes in Redis; none before the first plan."""
        packed = await stored(self._redis.get(key_names.SERVING))
        return self._newest(packed), packed or b""

    async def change(self, event: PlanEvent) -> ServingPlan:
        """Apply an event to the plan, and return the plan after it. Nothing is written if Redis has it.

        Pushes and canaries that end are kept among the last ones. A push that a newer one replaces is kept as
        superseded.
        """
        while True:
            packed = await stored(self._redis.get(key_names.SERVING))
            stored_plan, before = plan_of(packed), self._newest(packed)
            after = event(before)
            if after == stored_plan:
                return after
            push, canary = _ended_push(before, after), _ended_canary(before, after)
            arguments: list[Argument] = [
                packed or b"",
                _packed(after),
                int(_id(after.push) != _id(stored_plan.push)),
                int(_id(after.canary) != _id(stored_plan.canary)),
                PUSHES_KEPT,
                _packed(push) if push else "",
                _packed(canary) if canary else "",
            ]
            if await self._confirm(REPLACE, REPLACED, arguments):
                return after

    async def last_pushes(self) -> list[Push]:
        """The last pushes that ended, the newest first."""
        packed = await stored(self._redis.lrange(key_names.PUSHES, 0, -1))
        return [msgspec.json.decode(each, type=Push) for each in packed]

    async def last_canaries(self) -> list[Canary]:
        """The last canaries that ended, the newest first."""
        packed = await stored(self._redis.lrange(key_names.CANARIES, 0, -1))
        return [msgspec.json.decode(each, type=Canary) for each in packed]

    async def note_servers(self, noted: Iterable[ServerPush]) -> None:
        """Note what servers do in the push, however many they are, in one round trip."""
        fields = [part for each in noted for part in (each.server, _packed(each))]
        async with self._redis.pipeline(transaction=False) as writing:
            for start in range(0, len(fields), 2 * NOTES):
                page = fields[start : start + 2 * NOTES]
                NOTE_SERVERS.queue(writing, [key_names.SERVER_PUSHES], page)
            await stored(writing.execute())

    async def server_pushes(self, push: int) -> Mapping[str, ServerPush]:
        """What each server does, or did, in this push, by the server's id."""
        packed = await stored(self._redis.hgetall(key_names.SERVER_PUSHES))
        found = [msgspec.json.decode(each, type=ServerPush) for each in packed.values()]
        return {each.server: each for each in found if each.push == push}

    def _newest(self, packed: bytes | None) -> ServingPlan:
        """The plan in Redis, or the known one if that is newer. An emptied Redis has no plan."""
        found, known = plan_of(packed), self._known()
        return known if packed is not None and found.newest_id < known.newest_id else found


class PushLease:
    """Lets one gateway process at a time drive pushes. Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis, lease_s: float) -> None:
        self._redis = redis
        self._token = f"{os.getpid()}-{secrets.token_hex(16)}"  # tells an operator which process drives
        self._lease_ms = int(lease_s * 1000)

    async def hold(self) -> bool:
        """Claim or renew the lease. Returns whether this process holds it now."""
        held = await HOLD_LEASE.run(self._redis, [key_names.PUSH_LEASE], [self._token, self._lease_ms])
        return bool(held)

    async def release(self) -> None:
        """Give the lease up, so that another process can claim it at once."""
        await RELEASE_LEASE.run(self._redis, [key_names.PUSH_LEASE], [self._token])


def _ended_push(before: ServingPlan, after: ServingPlan) -> Push | None:
    """The push that ends with this change."""
    former, push = before.push, after.push
    if former is None or push is None or former.state != "pushing":
        return None
    if former.id != push.id:
        return msgspec.structs.replace(former, state="superseded", ended_at=push.started_at)
    return push if push.state != "pushing" else None


def _ended_canary(before: ServingPlan, after: ServingPlan) -> Canary | None:
    """The canary that ends with this change."""
    ended = after.canary if before.canary is not None and before.canary.active else None
    return ended if ended is not None and not ended.active else None


def _id(part: Push | Canary | None) -> int | None:
    return None if part is None else part.id


def _packed(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


KEPT = 50_000
"""How many records are kept, about."""
READ_AT_ONCE = 2_000
BEGINNING = "0-0"


class CanaryLog:
    """Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis) -> None:
        """`redis` returns bytes (decode_responses off)."""
        self._redis = redis

    async def note(self, record: CanaryRecord) -> None:
        fields = {"record": msgspec.json.encode(record)}
        await stored(self._redis.xadd(key_names.CANARY_LOG, fields, maxlen=KEPT, approximate=True))  # type: ignore[arg-type]

    async def read(self, after: str) -> tuple[list[CanaryRecord], str]:
        """The records after this entry, and the id of the last one."""
        entries = await stored(self._redis.xrange(key_names.CANARY_LOG, f"({after}", "+", READ_AT_ONCE))
        records = [
            msgspec.json.decode(fields[b"record"], type=CanaryCall | CanaryScore) for _, fields in entries
        ]
        return records, entries[-1][0].decode() if entries else after

    async def store_report(self, report: CanaryReport) -> None:
        await stored(self._redis.set(key_names.CANARY_REPORT, msgspec.json.encode(report)))

    async def report(self) -> CanaryReport:
        """The numbers of the open canary, as they were last looked at."""
        packed = await stored(self._redis.get(key_names.CANARY_REPORT))
        return CanaryReport() if packed is None else msgspec.json.decode(packed, type=CanaryReport)

    async def group_opened_at(self, group_id: str) -> float | None:
        """When the group's first session was opened, in seconds since the epoch; None if nobody knows."""
        opened_at = await stored(self._redis.hget(key_names.group(group_id), "opened_at"))
        return None if opened_at is None else float(opened_at)
