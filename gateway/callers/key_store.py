"""Keeps in Redis the API keys that `POST /admin/keys` makes, and what every key has used.

weir:keys           name → key, JSON; changed by compare and set, so that two operators undo nothing
weir:keys_changed   the id of the last change, so that a poll reads the keys only after one
weir:keys_used      name → when the key was used last
weir:keys_tokens    name → tokens that its calls used
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.ids import new_id
from rollout_queue.http.callers import Role, digest
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.losses import note_loss_async, was_lost
from rollout_queue.redis.lua import Argument, Confirm, Script, unconfirmed

REPLACE = Script[int]("""
-- KEYS: keys, changed   ARGV: name, the key as it was read ('' if there was none), the new key, a new id
-- Returns 1, or 0 if another gateway changed the key meanwhile.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('SET', KEYS[2], ARGV[4])
return 1
""")

USE_LOST = "what API keys have used counts from 0, also against their token_budget"


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""A name is shorter than a digest, so that no name is the owner of another key's sessions."""
Source = Literal["settings", "file", "admin"]
"""`settings`: a key of the section `gateway`; `file`: `keys_file`; `admin`: `POST /admin/keys`."""


class Secret(msgspec.Struct, frozen=True):
    """One secret of a key. A key has several while its users change from one to the next."""

    digest: str
    """SHA-256 of the secret, in hex."""
    created_at: float = 0.0
    expires_at: float | None = None
    """Seconds since the epoch; the secret is not accepted any more from then on. None: it does not expire."""

    def accepted(self, now: float) -> bool:
        return self.expires_at is None or now < self.expires_at


Limit = Annotated[int, msgspec.Meta(ge=1)]


class KeyLimits(msgspec.Struct, frozen=True):
    """What one key may use. None: the limit of the deployment, if it has one."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    token_budget: Limit | None = None
    """Tokens of prompts and answers together, for as long as the key exists."""


class ApiKey(msgspec.Struct, frozen=True):
    """A key, as it is configured or stored."""

    name: str
    role: Role
    secrets: tuple[Secret, ...]
    limits: KeyLimits = KeyLimits()
    source: Source = "admin"
    created_at: float = 0.0
    revoked_at: float | None = None
    """A revoked key stays listed, so that no later key of its name gets its sessions."""

    @property
    def owner(self) -> str:
        """What the sessions of this key have as their owner: a plain key's digest, else the name."""
        return self.secrets[0].digest if self.source == "settings" else self.name

    def accepted_secrets(self, now: float) -> tuple[Secret, ...]:
        return () if self.revoked_at is not None else tuple(one for one in self.secrets if one.accepted(now))


class KeyUse(msgspec.Struct):
    """When a key was used last, in seconds since the epoch, and how many tokens its calls used."""

    at: float = 0.0
    tokens: int = 0


class KeyStore:
    """The keys in Redis. Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis, confirm: Confirm | None = None) -> None:
        """`redis` returns bytes (decode_responses off)."""
        self._redis, self._confirm = redis, confirm or unconfirmed(redis)

    async def last_change(self) -> bytes:
        """The id of the last change; empty if there was none."""
        return bytes(await stored(self._redis.get(key_names.KEYS_CHANGED)) or b"")

    async def count(self) -> int:
        return int(await stored(self._redis.hlen(key_names.KEYS)))

    async def all(self) -> tuple[ApiKey, ...]:
        found = await stored(self._redis.hgetall(key_names.KEYS))
        return tuple(msgspec.json.decode(each, type=ApiKey) for each in found.values())

    async def read(self, name: str) -> tuple[ApiKey | None, bytes]:
        """The key, and its bytes for `replace`; (None, b"") if there is none."""
        packed = await stored(self._redis.hget(key_names.KEYS, name))
        return (None, b"") if packed is None else (msgspec.json.decode(packed, type=ApiKey), packed)

    async def replace(self, packed: bytes, key: ApiKey) -> bool:
        """Store the key in place of the one with these bytes. Returns False if that was changed."""
        arguments: list[Argument] = [key.name, packed, msgspec.json.encode(key), new_id()]
        return bool(await self._confirm(REPLACE, [key_names.KEYS, key_names.KEYS_CHANGED], arguments))

    async def write_again(self, known: Sequence[ApiKey]) -> None:
        """Store those of these keys that Redis has lost, and say so: none is ever removed."""
        there = await stored(self._redis.hkeys(key_names.KEYS))
        lost = [key for key in known if key.name.encode() not in there]
        if not lost or not await was_lost(self._redis, key_names.KEYS):
            return
        async with self._redis.pipeline(transaction=False) as writing:
            for key in lost:
                writing.hsetnx(key_names.KEYS, key.name, msgspec.json.encode(key))
            writing.set(key_names.KEYS_CHANGED, new_id())
            await stored(writing.execute())
        names = ", ".join(sorted(key.name for key in lost))
        said = (
            f"{key_names.KEYS} had lost these API keys, and a gateway that knew them has written them again"
        )
        await note_loss_async(self._redis, key_names.KEYS, f"{said}: {names}")

    async def add_usage(self, usage: Mapping[str, KeyUse]) -> Mapping[str, int]:
        """Add what keys used since the last call, by name. Returns how many tokens each has used in all.

        If Redis does not answer in time, it may have added the use, which the caller then adds again.
        """
        if not usage:
            return {}
        async with self._redis.pipeline(transaction=False) as adding:
            used: Any = {name: each.at for name, each in usage.items() if each.at}
            if used:
                adding.hset(key_names.KEYS_USED, mapping=used)
            for name, each in usage.items():
                adding.hincrby(key_names.KEYS_TOKENS, name, each.tokens)
            spent = (await stored(adding.execute()))[-len(usage) :]
        return dict(zip(usage, map(int, spent), strict=True))

    async def note_lost_use(self) -> None:
        """Say that the tokens of keys have become fewer."""
        await note_loss_async(
            self._redis, key_names.KEYS_TOKENS, f"{key_names.KEYS_TOKENS} was gone: {USE_LOST}"
        )

    async def usage(self) -> Mapping[str, KeyUse]:
        """What every key has used, by name."""
        used = await stored(self._redis.hgetall(key_names.KEYS_USED))
        tokens = await stored(self._redis.hgetall(key_names.KEYS_TOKENS))
        return {name.decode(): KeyUse(float(at), int(tokens.get(name, 0))) for name, at in used.items()}


def plain_key(secret: str, role: Role) -> ApiKey:
    """A key of the settings, which have a secret and no name."""
    hashed = digest(secret)
    return ApiKey(f"key-{hashed[:8]}", role, (Secret(hashed),), source="settings")
