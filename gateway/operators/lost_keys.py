"""Notices keys that Redis has lost, says so, and writes again what this gateway knows of them.

every poll: which keys exist? ─▶ weir:lasting names one that does not ─▶ weir:losses ─▶ status, doctor, audit
                             └─▶ the secret and weir:lasting are gone ─▶ Redis came back empty

Weir never removes these keys, and `weir:lasting` has the names of those that a gateway has seen. Others are
written again where they are read: API keys (`callers/api_keys.py`), registrations, drained servers and the
serving plan (`engines/fleet.py`). The trainer notices what it has lost of the stream and of its lease.
Whoever empties Redis on purpose while gateways run keeps `weir:secret`: then nothing is written again.
"""

from collections.abc import Awaitable, Callable, Sequence

from redis.asyncio import Redis

from gateway.callers.key_store import USE_LOST
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.client.losses import note_loss_async, recent_losses
from rollout_queue.redis.connection.schema import claim_schema_async
from rollout_queue.redis.keys import Key
from rollout_queue.redis.sessions.indexes import SessionIndexes

WHOLE = "weir:"
"""Under this name, the losses have that of everything."""
EMPTIED = (
    "Redis has lost its data since this gateway started: the sessions and records of before are gone; `weir "
    "audit` names the steps that Redis has no trace of"
)
WATCHED: dict[Key, str | None] = {
    keys.SCHEMA: "the gateways have written it again",
    keys.SECRET: "the gateways have written it again, so session keys stay valid",
    keys.VERDICTS: "the counts of verdicts begin again, so `weir audit` finds that counters differ",
    keys.FORGOTTEN: "the counts of forgotten sessions begin again, so `weir audit` finds that they differ",
    keys.FORGOTTEN_IDS: "ids of forgotten sessions can be used again, and such sessions may end as late",
    keys.STEPS: "what made the earlier versions is no longer known (GET /admin/policies/{version}/lineage)",
    keys.POLICIES: "earlier versions cannot be served again; the trainer's next version can",
    keys.RESERVED: "no number is reserved until the trainer's next step",
    keys.REMOVED: "removed versions are unknown ones",
    keys.PUSHES: "how earlier pushes ended is no longer known",
    keys.CANARIES: "how earlier canaries ended is no longer known",
    keys.ADAPTER_VERSIONS: "the versions of adapters count from those that are there",
    keys.KEYS_TOKENS: USE_LOST,
    keys.ADMIN_ACTIONS: "what admins did before is no longer known (GET /admin/actions)",
    keys.DELETED: "deleted sessions are unknown ones, and their ids can be used again",
    keys.DELETED_USERS: "calls that name a deleted user are accepted: delete these users again",
    keys.COMMANDS: "commands that the trainer had not carried out are lost: their clients must repeat them",
    **dict.fromkeys((keys.KEYS, keys.SERVERS, keys.HELD, keys.SERVING)),  # others notice these
}
"""Keys that are never removed, and what it means if one is gone."""

OF_ITS_TYPE: dict[str, Callable[[Key], tuple[str | int, ...]]] = {
    "string": lambda key: ("STRLEN", key),
    "hash": lambda key: ("HLEN", key),
    "set": lambda key: ("SCARD", key),
    "zset": lambda key: ("ZCARD", key),
    "list": lambda key: ("LRANGE", key, 0, 0),
    "stream": lambda key: ("XLEN", key),
}
"""A command by which the client notices that a key has a value of another type, and moves it."""


class LostKeys:
    """What this gateway has noticed."""

    def __init__(
        self, redis: Redis, secret: bytes, write_again: Sequence[Callable[[], Awaitable[object]]]
    ) -> None:
        """`write_again` store what this gateway knows, if Redis has lost everything."""
        self._redis, self._secret, self._write_again = redis, secret, write_again
        self._indexes = SessionIndexes(redis)
        self._emptied = False
        """Whether Redis has lost everything since this gateway started."""

    async def refresh(self) -> None:
        """Raises StorageUnavailable."""
        named, there = await self._look()
        if keys.SECRET not in there and keys.SECRET not in named:
            await self._heal_all()
            return
        for key in named - there:
            # A gateway that does not remove the name is not the first to notice the loss.
            if WATCHED[key] is not None and await stored(self._redis.srem(keys.LASTING, key)):
                await self._heal(key)
        if new := there - named:
            await stored(self._redis.sadd(keys.LASTING, *new))
        await self._indexes.mend()

    async def warnings(self) -> list[str]:
        """The losses of the last day. Raises StorageUnavailable."""
        packed = await stored(self._redis.hgetall(keys.LOSSES))
        if self._emptied:
            packed.pop(WHOLE.encode(), None)
        return [*([EMPTIED] if self._emptied else []), *recent_losses(packed)]

    async def _look(self) -> tuple[frozenset[Key], frozenset[Key]]:
        """Those of the watched keys that have existed, and those that exist."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.smembers(keys.LASTING)
            for key in WATCHED:
                pipeline.exists(key)
            for key in WATCHED:
                pipeline.execute_command(*OF_ITS_TYPE[key.kind](key))  # bounded: by one of these commands
            named, *found = await stored(pipeline.execute())
        there = frozenset(key for key, exists in zip(WATCHED, found, strict=False) if exists)
        return frozenset(key for key in WATCHED if key.encode() in named), there

    async def _heal(self, key: Key) -> None:
        await stored(self._redis.set(keys.SECRET, self._secret, nx=True))
        await claim_schema_async(self._redis)
        await note_loss_async(self._redis, key, f"{key} was gone: {WATCHED[key]}")

    async def _heal_all(self) -> None:
        self._emptied = True
        for write in self._write_again:  # before the secret, whose absence says what has happened
            await write()
        await claim_schema_async(self._redis)
        if await stored(self._redis.set(keys.SECRET, self._secret, nx=True)):
            said = "Redis came back empty: the sessions, records and counts of before are gone"
            await note_loss_async(self._redis, WHOLE, said)
