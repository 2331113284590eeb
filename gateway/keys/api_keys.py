"""All API keys of a gateway, and what their calls have used since the last poll.

settings, keys_file ──start, SIGHUP──▶ ┐
                                       ├─▶ ApiKeys: by the digest of a secret, and by the owner of sessions
weir:keys in Redis ──every poll──────▶ ┘

If two sources have a key of one name, settings and file come before Redis.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

from gateway.keys.api_key import ApiKey, KeyLimits, plain_key
from gateway.keys.key_file import WrongKeyFile, keys_of_file
from gateway.keys.key_store import KeyStore, KeyUse
from gateway.settings.service import GatewaySettings
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.keys import DEFAULT_KEYS, ServiceRole, digest

logger = logging.getLogger(__name__)

NO_LIMITS = KeyLimits()


def service_keys(settings: GatewaySettings) -> Mapping[ServiceRole, str | None]:
    return {"rollout_server": settings.rollout_server_key, "trainer": settings.trainer_key}


def configured_keys(settings: GatewaySettings) -> tuple[ApiKey, ...]:
    """The keys of the settings and of the file that they name. Raises WrongKeyFile."""
    plain = [plain_key(each, "client") for each in settings.client_keys]
    plain += [plain_key(each, "admin") for each in settings.admin_keys]
    plain += [plain_key(each, role) for role, each in service_keys(settings).items() if each is not None]
    return (*plain, *(keys_of_file(settings.keys_file) if settings.keys_file else ()))


class ApiKeys:
    """The keys that this gateway accepts. Without any key it is open: every caller is an admin."""

    def __init__(self, configured: tuple[ApiKey, ...], store: KeyStore | None = None) -> None:
        """Without `store`, the keys are only those that are configured."""
        self._store = store
        self.configured = configured
        self._stored: tuple[ApiKey, ...] = ()
        self._last_change: bytes | None = None
        self._unshared: dict[str, KeyUse] = {}
        self._sharing: dict[str, KeyUse] = {}
        """What Redis is told now: it may not be part of `_spent` yet."""
        self._spent: Mapping[str, int] = {}
        """By name, the tokens in all, as of the last poll; only of keys with a budget."""
        self._index()

    def _index(self) -> None:
        names = {key.name for key in self.configured}
        known = [*(key for key in self._stored if key.name not in names), *self.configured]
        self._by_digest = {one.digest: key for key in known for one in key.secrets}
        self._by_owner = {key.owner: key for key in known}
        self.limited = any(key.limits != NO_LIMITS for key in known)

    # Finding

    @property
    def all(self) -> Iterable[ApiKey]:
        """Every key, also revoked ones."""
        return self._by_owner.values()

    @property
    def open(self) -> bool:
        return not self.configured

    @property
    def defaults(self) -> tuple[str, ...]:
        """The keys of DEFAULT_KEYS that this gateway accepts."""
        return tuple(key for key in DEFAULT_KEYS if self.find(digest(key)) is not None)

    def find(self, presented: str | None) -> ApiKey | None:
        """The key with a secret of this digest. The time of the search tells nothing about a secret, because
        nobody can choose the digest of one."""
        key = None if presented is None else self._by_digest.get(presented)
        if key is None or all(one.digest != presented for one in key.accepted_secrets(clock.now())):
            return None
        return key

    def known_owner(self, owner: str) -> bool:
        """Whether a key with these sessions is still accepted."""
        key = self._by_owner.get(owner) or self._by_digest.get(owner)
        return self.open or (key is not None and bool(key.accepted_secrets(clock.now())))

    def limits_of(self, owner: str) -> KeyLimits:
        key = self._by_owner.get(owner)
        return NO_LIMITS if key is None else key.limits

    # KeyUse

    def note_use(self, key: ApiKey) -> None:
        self._usage(key.name).at = clock.now()

    def spend(self, owner: str, tokens: int) -> None:
        """Count the tokens of a call for the key that owns its session."""
        if (key := self._by_owner.get(owner)) is not None:
            usage = self._usage(key.name)
            usage.tokens += tokens
            usage.at = usage.at or clock.now()

    def left(self, owner: str) -> int | None:
        """How many tokens the key's budget has left; None if it has none."""
        key = self._by_owner.get(owner)
        if key is None or key.limits.token_budget is None:
            return None
        own = sum(each[key.name].tokens for each in (self._unshared, self._sharing) if key.name in each)
        return max(0, key.limits.token_budget - self._spent.get(key.name, 0) - own)

    def _usage(self, name: str) -> KeyUse:
        usage = self._unshared.get(name)
        if usage is None:
            usage = self._unshared[name] = KeyUse()
        return usage

    # Changes

    def reload(self, read: Callable[[], tuple[ApiKey, ...]]) -> None:
        """Take the keys that `read` returns in place of those of settings and file.

        Keys that cannot be read, or that would open the gateway to everybody, change nothing.
        """
        try:
            configured = read()
        except WrongKeyFile as error:
            logger.error("the keys stay as they were: %s", error)
            return
        except ValueError:  # its message could quote a key
            logger.error("the keys stay as they were: the configuration is not valid")
            return
        if not configured and self.configured:
            logger.error("the keys stay as they were: the new configuration has none")
            return
        self.configured = configured
        self._index()
        logger.info("%d keys were read from the configuration", len(configured))

    async def refresh(self) -> None:
        """Read keys that were changed in Redis, and share what was used here. Raises StorageUnavailable."""
        if (store := self._store) is None:
            return
        last_change = await store.last_change()
        if last_change != self._last_change or (self._stored and not await store.count()):
            await self.write_again()
            self._last_change = await store.last_change()
            self._stored = await store.all()
            self._index()
        await self._share(store)

    async def write_again(self) -> None:
        """Store the keys that Redis has lost, if this gateway knows them. Raises StorageUnavailable."""
        if self._store is not None and self._stored:
            await self._store.write_again(self._stored)

    async def _share(self, store: KeyStore) -> None:
        usage, self._unshared = self._unshared, {}
        self._sharing = usage
        # A budget that other gateways use is read with no usage of this gateway's own.
        asked = {key.name: KeyUse() for key in self.all if key.limits.token_budget is not None} | usage
        try:
            before, self._spent = self._spent, await store.add_usage(asked)
            if any(tokens < before.get(name, 0) for name, tokens in self._spent.items()):
                await store.note_lost_use()
        except StorageUnavailable:
            for name, each in usage.items():
                later = self._usage(name)
                later.tokens += each.tokens
                later.at = max(later.at, each.at)
            raise
        finally:
            self._sharing = {}
