"""Notices keys that Redis has lost, says so, and writes again what this gateway knows of them.

every poll: which keys exist? ─▶ weir:lasting names one that does not ─▶ weir:losses ─▶ status, doctor, audit
                             └─▶ the secret and weir:lasting are gone ─▶ Redis came back empty

Weir never removes these keys, and `weir:lasting` has the names of those that a gateway has seen. Others are
written again where they are read: API keys (`callers/api_keys.py`), registrations, drained servers and the
serving plan (`fleet/fleet.py`). The trainer notices what it has lost of the stream and of its lease.
Whoever empties Redis on purpose while gateways run keeps `weir:secret`: then nothing is written again.
"""

from collections.abc import Awaitable, Callable, Sequence

from redis.asyncio import Redis

from gateway.callers.key_store import USE_LOST
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.key_names import Key
from rollout_queue.redis.losses import note_loss_async, recent_losses
from rollout_queue.redis.schema_version import claim_schema_async
from rollout_queue.redis.session_store import SessionIndexes

WHOLE = "weir:"
"""Under this name, the losses have that of everything."""
EMPTIED = (
    "Redis has lost its data and came back empty: the sessions and records of before are gone; `weir audit` "
    "names the steps that Redis has no trace of"
)
OF_ANOTHER = (
    "Redis has lost its data, and another gateway has stored its own secret: restart the gateways, so that "
    "they share one secret again"
)
WATCHED: dict[Key, str | None] = {
    key_names.SCHEMA: "the gateways have written it again",
    key_names.SECRET: "the gateways have written it again, so session keys stay valid",
    key_names.VERDICTS: "the counts of verdicts begin again, so `weir audit` finds that counters differ",
    key_names.FORGOTTEN: "the counts of forgotten sessions begin again, so `weir audit` finds that they "
    "differ",
    key_names.FORGOTTEN_IDS: "ids of forgotten sessions can be used again, and such sessions may end as late",
    key_names.STEPS: "what made the earlier versions is no longer known "
    "(GET /admin/policies/{version}/lineage)",
    key_names.POLICIES: "earlier versions cannot be served again; the trainer's next version can",
    key_names.RESERVED: "no number is reserved until the trainer's next step",
    key_names.REMOVED: "removed versions are unknown ones",
    key_names.PUSHES: "how earlier pushes ended is no longer known",
    key_names.CANARIES: "how earlier canaries ended is no longer known",
    key_names.ADAPTER_VERSIONS: "the versions of adapters count from those that are there",
    key_names.KEYS_TOKENS: USE_LOST,
    key_names.ADMIN_ACTIONS: "what admins did before is no longer known (GET /admin/actions)",
    key_names.DELETED: "deleted sessions are unknown ones, and their ids can be used again",
    key_names.DELETED_USERS: "calls that name a deleted user are accepted: delete these users again",
    key_names.COMMANDS: "commands that the trainer had not carried out are lost: their clients must "
    "repeat them",
    # others notice these
    **dict.fromkeys((key_names.KEYS, key_names.SERVERS, key_names.HELD, key_names.SERVING)),
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

    async def refresh(self) -> None:
        """Raises StorageUnavailable."""
        named, there = await self._look()
        if key_names.SECRET not in there and key_names.SECRET not in named:
            await self._heal_all()
            return
        for key in named - there:
            # A gateway that does not remove the name is not the first to notice the loss.
            if WATCHED[key] is not None and await stored(self._redis.srem(key_names.LASTING, key)):
                await self._heal(key)
        if new := there - named:
            await stored(self._redis.sadd(key_names.LASTING, *new))
        await self._indexes.mend()

    async def warnings(self) -> list[str]:
        """The losses of the last day. Raises StorageUnavailable."""
        secret = await stored(self._redis.get(key_names.SECRET))
        losses = recent_losses(await stored(self._redis.hgetall(key_names.LOSSES)))
        if secret is None and EMPTIED not in losses:  # this gateway or another one will note it
            return [EMPTIED, *losses]
        return [OF_ANOTHER, *losses] if secret not in (None, self._secret) else losses

    async def _look(self) -> tuple[frozenset[Key], frozenset[Key]]:
        """Those of the watched keys that have existed, and those that exist."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.smembers(key_names.LASTING)
            for key in WATCHED:
                pipeline.exists(key)
            for key in WATCHED:
                pipeline.execute_command(*OF_ITS_TYPE[key.kind](key))  # bounded: by one of these commands
            named, *found = await stored(pipeline.execute())
        there = frozenset(key for key, exists in zip(WATCHED, found, strict=False) if exists)
        return frozenset(key for key in WATCHED if key.encode() in named), there

    async def _heal(self, key: Key) -> None:
        await stored(self._redis.set(key_names.SECRET, self._secret, nx=True))
        await claim_schema_async(self._redis)
        await note_loss_async(self._redis, key, f"{key} was gone: {WATCHED[key]}")

    async def _heal_all(self) -> None:
        for write in self._write_again:  # before the secret, whose absence says what has happened
            await write()
        await claim_schema_async(self._redis)
        await note_loss_async(self._redis, WHOLE, EMPTIED)
        await stored(self._redis.set(key_names.SECRET, self._secret, nx=True))
