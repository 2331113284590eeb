"""The serving plan in Redis, what each server did in the push, and the lease of the gateway that drives it.

gateway ── read ──▶ plan ── change it ──▶ replace, unless another gateway has changed it since ─┐
   ▲                                                                                            │
   └──────────────────────────────────── read again ◀───────────────────────────────────────────┘

A failover of Redis may lose the last changes. Then the plan in Redis is older than the one that a gateway
knows, which counts, and is written again with the next change.
"""

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.policies.canary import Canary
from rollout_queue.contract.policies.serving import Push, ServerPush, ServingPlan, plan_of
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.connection.replicas import Argument, Confirm, unconfirmed
from rollout_queue.redis.scripts import serving as scripts

PlanEvent = Callable[[ServingPlan], ServingPlan]
"""A change of the plan."""
PUSHES_KEPT = 100
"""How many ended pushes, and how many ended canaries, are kept."""
NOTES = 200
"""How many servers one script notes."""
REPLACED: list[str] = [
    keys.SERVING,
    keys.SERVER_PUSHES,
    keys.PUSHES,
    keys.CANARIES,
    keys.CANARY_LOG,
    keys.CANARY_REPORT,
]


class ServingRegister:
    """The gateways' access to the plan. Every method raises StorageUnavailable."""

    def __init__(
        self,
        redis: Redis,
        confirm: Confirm = unconfirmed,
        known: Callable[[], ServingPlan] = ServingPlan,
    ) -> None:
        """`redis` returns bytes (decode_responses off); `known` returns the newest plan that the caller has
        seen."""
        self._redis, self._confirm, self._known = redis, confirm, known
        self._replace = redis.register_script(scripts.REPLACE)
        self._note = redis.register_script(scripts.NOTE_SERVERS)

    async def read(self) -> ServingPlan:
        return (await self.read_packed())[0]

    async def read_packed(self) -> tuple[ServingPlan, bytes]:
        """The plan, and its bytes in Redis; none before the first plan."""
        packed = await stored(self._redis.get(keys.SERVING))
        return self._newest(packed), packed or b""

    async def change(self, event: PlanEvent) -> ServingPlan:
        """Apply an event to the plan, and return the plan after it. Nothing is written if Redis has it.

        Pushes and canaries that end are kept among the last ones. A push that a newer one replaces is kept as
        superseded.
        """
        while True:
            packed = await stored(self._redis.get(keys.SERVING))
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
            if await self._confirm(self._replace, REPLACED, arguments):
                return after

    async def last_pushes(self) -> list[Push]:
        """The last pushes that ended, the newest first."""
        packed = await stored(self._redis.lrange(keys.PUSHES, 0, -1))
        return [msgspec.json.decode(each, type=Push) for each in packed]

    async def last_canaries(self) -> list[Canary]:
        """The last canaries that ended, the newest first."""
        packed = await stored(self._redis.lrange(keys.CANARIES, 0, -1))
        return [msgspec.json.decode(each, type=Canary) for each in packed]

    async def note_servers(self, noted: Iterable[ServerPush]) -> None:
        """Note what servers do in the push, however many they are, in one round trip."""
        fields = [part for each in noted for part in (each.server, _packed(each))]
        async with self._redis.pipeline(transaction=False) as writing:
            for start in range(0, len(fields), 2 * NOTES):
                page = fields[start : start + 2 * NOTES]
                await self._note([keys.SERVER_PUSHES], page, client=cast(Redis, writing))
            await stored(writing.execute())

    async def server_pushes(self, push: int) -> Mapping[str, ServerPush]:
        """What each server does, or did, in this push, by the server's id."""
        packed = await stored(self._redis.hgetall(keys.SERVER_PUSHES))
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
        self._hold = redis.register_script(scripts.HOLD_LEASE)
        self._release = redis.register_script(scripts.RELEASE_LEASE)

    async def hold(self) -> bool:
        """Claim or renew the lease. Returns whether this process holds it now."""
        return bool(await stored(self._hold([keys.PUSH_LEASE], [self._token, self._lease_ms])))

    async def release(self) -> None:
        """Give the lease up, so that another process can claim it at once."""
        await stored(self._release([keys.PUSH_LEASE], [self._token]))


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
