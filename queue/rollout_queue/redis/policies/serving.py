"""The serving plan in Redis, what each server did in the push, and the lease of the gateway that drives it.

gateway ── read ──▶ plan ── change it ──▶ replace, unless another gateway has changed it since ─┐
   ▲                                                                                            │
   └──────────────────────────────────── read again ◀───────────────────────────────────────────┘
"""

import os
import secrets
from collections.abc import Callable, Mapping

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.policies.canary import Canary
from rollout_queue.contract.policies.serving import Push, ServerPush, ServingPlan, plan_of
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.scripts import serving as scripts

PlanEvent = Callable[[ServingPlan], ServingPlan]
"""A change of the plan."""
PUSHES_KEPT = 100
"""How many ended pushes, and how many ended canaries, are kept."""
REPLACED = [
    keys.SERVING,
    keys.SERVER_PUSHES,
    keys.PUSHES,
    keys.CANARIES,
    keys.CANARY_LOG,
    keys.CANARY_REPORT,
]


class ServingRegister:
    """The gateways' access to the plan. Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis) -> None:
        """`redis` returns bytes (decode_responses off)."""
        self._redis = redis
        self._replace = redis.register_script(scripts.REPLACE)
        self._note = redis.register_script(scripts.NOTE_SERVER)

    async def read(self) -> ServingPlan:
        return (await self.read_packed())[0]

    async def read_packed(self) -> tuple[ServingPlan, bytes]:
        """The plan, and its bytes in Redis; none before the first plan."""
        packed = await stored(self._redis.get(keys.SERVING))
        return plan_of(packed), packed or b""

    async def change(self, event: PlanEvent) -> ServingPlan:
        """Apply an event to the plan, and return the plan after it. Nothing is written if nothing changes.

        Pushes and canaries that end are kept among the last ones. A push that a newer one replaces is kept as
        superseded.
        """
        while True:
            packed = await stored(self._redis.get(keys.SERVING))
            before = plan_of(packed)
            after = event(before)
            if after == before:
                return after
            push, canary = _ended_push(before, after), _ended_canary(before, after)
            arguments = [
                packed or b"",
                _packed(after),
                int(_id(after.push) != _id(before.push)),
                int(_id(after.canary) != _id(before.canary)),
                PUSHES_KEPT,
                _packed(push) if push else "",
                _packed(canary) if canary else "",
            ]
            if await stored(self._replace(REPLACED, arguments)):
                return after

    async def last_pushes(self) -> list[Push]:
        """The last pushes that ended, the newest first."""
        packed = await stored(self._redis.lrange(keys.PUSHES, 0, -1))
        return [msgspec.json.decode(each, type=Push) for each in packed]

    async def last_canaries(self) -> list[Canary]:
        """The last canaries that ended, the newest first."""
        packed = await stored(self._redis.lrange(keys.CANARIES, 0, -1))
        return [msgspec.json.decode(each, type=Canary) for each in packed]

    async def note_server(self, server_push: ServerPush) -> None:
        """Note what a server does in the push."""
        await stored(self._note([keys.SERVER_PUSHES], [server_push.server, _packed(server_push)]))

    async def server_pushes(self, push: int) -> Mapping[str, ServerPush]:
        """What each server does, or did, in this push, by the server's id."""
        packed = await stored(self._redis.hgetall(keys.SERVER_PUSHES))
        found = [msgspec.json.decode(each, type=ServerPush) for each in packed.values()]
        return {each.server: each for each in found if each.push == push}


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
