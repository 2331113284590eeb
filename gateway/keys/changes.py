"""What operators do with API keys: make, rotate, limit and revoke them. The secret is shown once."""

import secrets
from collections.abc import Callable, Mapping

import msgspec

from gateway.errors import ObjectNotFound, StateConflict
from gateway.keys.api_key import ApiKey, KeyLimits, Secret
from gateway.keys.api_keys import ApiKeys
from gateway.keys.key_store import KeyStore, KeyUse
from rollout_queue import clock
from rollout_queue.http.keys import Role, digest

MAX_KEYS = 10_000
"""How many keys Redis has at most. Every gateway has all of them in memory."""
MAX_SECRETS = 8
"""A key has at most this many secrets that are still accepted."""
TRIES = 16
"""How often a change is tried if other operators change the same key at the same moment."""
NewSecret = tuple[ApiKey, str]
"""A key, and its newest secret in the clear."""


class KeyChanges:
    """Changes the keys in Redis. Other gateways accept a new key, and refuse a revoked one, after a poll.

    Every method raises StorageUnavailable.
    """

    def __init__(self, keys: ApiKeys, store: KeyStore) -> None:
        self._keys, self._store = keys, store

    async def usage(self) -> Mapping[str, KeyUse]:
        """What every key has used, by name."""
        return await self._store.usage()

    async def create(self, name: str, role: Role, limits: KeyLimits) -> NewSecret:
        """Make a key. Raises StateConflict if there is or was one of that name, or if the gateway is open."""
        if self._keys.open:
            message = "this gateway has no key, so its first key would shut its operators out: configure one"
            raise StateConflict(message, code="no_admin_key")
        now, secret = clock.now(), _new_secret()
        key = ApiKey(name, role, (Secret(digest(secret), now),), limits, created_at=now)
        if await self._store.count() >= MAX_KEYS:
            raise StateConflict(f"there are {MAX_KEYS} keys, revoked ones included", code="too_many_keys")
        if name in (each.name for each in self._keys.configured) or not await self._store.replace(b"", key):
            raise StateConflict(f"there is or was a key {name}", param="name", code="key_exists")
        await self._keys.refresh()
        return key, secret

    async def rotate(self, name: str, keep_s: float) -> NewSecret:
        """Give a key a new secret. Its earlier ones are accepted for `keep_s` more seconds.

        Raises ObjectNotFound, and StateConflict as `_change`, or if too many secrets are still accepted.
        """
        secret = _new_secret()

        def rotated(key: ApiKey) -> ApiKey:
            now = clock.now()
            former = tuple(_ending(each, now + keep_s) for each in key.accepted_secrets(now))
            former = tuple(each for each in former if each.accepted(now))
            if len(former) >= MAX_SECRETS:
                message = f"{name} has {len(former)} secrets that are still accepted; rotate it with keep_s 0"
                raise StateConflict(message, code="too_many_secrets")
            return msgspec.structs.replace(key, secrets=(*former, Secret(digest(secret), now)))

        return await self._change(name, rotated), secret

    async def limit(self, name: str, limits: KeyLimits) -> ApiKey:
        """Set the limits of a key. Raises as `rotate`."""
        return await self._change(name, lambda key: msgspec.structs.replace(key, limits=limits))

    async def revoke(self, name: str) -> ApiKey:
        """Refuse a key from now on, and the session keys of its sessions. Raises as `rotate`."""
        return await self._change(
            name, lambda key: msgspec.structs.replace(key, secrets=(), revoked_at=clock.now()), revoked=True
        )

    async def _change(
        self, name: str, change: Callable[[ApiKey], ApiKey], *, revoked: bool = False
    ) -> ApiKey:
        """Change a key. Raises ObjectNotFound, and StateConflict for a key that is configured or revoked.

        `revoked`: a key that is revoked already is returned unchanged.
        """
        for key in self._keys.configured:
            if key.name == name:
                where = "the settings" if key.source == "settings" else "gateway.keys_file"
                raise StateConflict(f"the key {name} is in {where}: change it there", code="key_configured")
        for _ in range(TRIES):
            found, packed = await self._store.read(name)
            if found is None:
                raise ObjectNotFound(f"there is no key {name}")
            if found.revoked_at is not None:
                if revoked:
                    return found
                raise StateConflict(f"the key {name} was revoked", code="key_revoked")
            changed = change(found)
            if await self._store.replace(packed, changed):
                await self._keys.refresh()
                return changed
        raise StateConflict(f"the key {name} is being changed by others; try again")


def _new_secret() -> str:
    return f"weir-{secrets.token_urlsafe(32)}"


def _ending(secret: Secret, at: float) -> Secret:
    """The secret, accepted until then at the latest."""
    ends = at if secret.expires_at is None else min(at, secret.expires_at)
    return msgspec.structs.replace(secret, expires_at=ends)
