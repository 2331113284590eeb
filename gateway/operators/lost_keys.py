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
from rollout_queue.redis.lua import Script
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
    # others notice these, which come last
    **dict.fromkeys((key_names.KEYS, key_names.SERVERS, key_names.HELD, key_names.SERVING)),
}
"""Keys that are never removed, and what it means if one is gone."""

LOOK = Script[list[int] | None]("""
-- KEYS: the names of those that existed, secret, key…
-- ARGV: the secret, how many of KEYS to look after, the type of each key's value
-- Redis may lose all between two commands, so this is one. Returns which are gone; nothing if all is.
for at = 3, #KEYS do -- bounded: the keys that Weir never removes
    local found = redis.call('TYPE', KEYS[at]).ok -- the client moves a value of another type
    if found ~= 'none' and found ~= ARGV[at] then return redis.error_reply('WRONGTYPE of ' .. found) end
end
local names, gone = KEYS[1], {}
if redis.call('EXISTS', KEYS[2]) + redis.call('SISMEMBER', names, KEYS[2]) == 0 then return false end
for at = 3, #KEYS do -- bounded: so, too
    local news = redis.call('EXISTS', KEYS[at]) - redis.call('SISMEMBER', names, KEYS[at])
    if news == 1 then redis.pcall('SADD', names, KEYS[at]) end -- a full Redis refuses it
    if news == -1 and at <= tonumber(ARGV[2]) then
        redis.call('SREM', names, KEYS[at])
        gone[#gone + 1] = at - 1
    end
end
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SET', KEYS[2], ARGV[1]) end
return gone
""")


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
        keys = [key_names.LASTING, key_names.SECRET, *WATCHED]
        watched = len(keys) - [*WATCHED.values()].count(None)
        types = [key.kind for key in WATCHED]
        gone = await LOOK.run(self._redis, keys, [self._secret, watched, *types])
        if gone is None:
            await self._heal_all()
        for at in gone or ():
            await note_loss_async(self._redis, keys[at], f"{keys[at]} was gone: {WATCHED[keys[at]]}")
        if gone:
            await claim_schema_async(self._redis)
        await self._indexes.mend()

    async def warnings(self) -> list[str]:
        """The losses of the last day. Raises StorageUnavailable."""
        secret = await stored(self._redis.get(key_names.SECRET))
        losses = recent_losses(await stored(self._redis.hgetall(key_names.LOSSES)))
        if secret is None and EMPTIED not in losses:  # this gateway or another one will note it
            return [EMPTIED, *losses]
        return [OF_ANOTHER, *losses] if secret not in (None, self._secret) else losses

    async def _heal_all(self) -> None:
        for write in self._write_again:  # before the secret, whose absence says what has happened
            await write()
        await claim_schema_async(self._redis)
        await note_loss_async(self._redis, WHOLE, EMPTIED)
        await stored(self._redis.set(key_names.SECRET, self._secret, nx=True))
