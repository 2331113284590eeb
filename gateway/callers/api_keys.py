"""All API keys of a gateway, and what their calls have used since the last poll.

settings, keys_file ──start, SIGHUP──▶ ┐
                                       ├─▶ ApiKeys: by the digest of a secret, and by the owner of sessions
weir:keys in Redis ──every poll──────▶ ┘

If two sources have a key of one name, settings and file come before Redis. `keys_file` is a YAML file, such
as a mounted secret:

keys:
  - name: team-a
    role: client                # or admin
    secrets: ["…", "…"]         # or secrets_sha256: ["…"], which reveals nothing
    requests_per_minute: 600    # optional, like tokens_per_minute and token_budget
"""

import logging
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import yaml

from gateway.callers.key_store import NAME, ApiKey, KeyLimits, KeyStore, KeyUse, Limit, Secret, plain_key
from gateway.errors import ObjectNotFound, StateConflict
from gateway.settings import GatewaySettings
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.callers import DEFAULT_KEYS, Role, ServiceRole, digest
from rollout_queue.service_log import log_ids
from rollout_queue.settings import is_secret

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
        self._unshared = defaultdict[str, KeyUse](KeyUse)
        self._sharing: Mapping[str, KeyUse] = {}
        """What Redis is told now: it may not be part of `_spent` yet."""
        self._spent: Mapping[str, int] = {}
        """By name, the tokens in all, as of the last poll; only of keys with a budget."""
        self._index()

    def _index(self) -> None:
        self.open = not self.configured
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
    def defaults(self) -> tuple[str, ...]:
        """The keys of DEFAULT_KEYS that this gateway accepts."""
        return tuple(key for key in DEFAULT_KEYS if self.find(digest(key)) is not None)

    def find(self, presented: str | None) -> ApiKey | None:
        """The key with a secret of this digest. The time of the search tells nothing about a secret, because
        nobody can choose the digest of one."""
        key = None if presented is None else self._by_digest.get(presented)
        if key is None or key.revoked_at is not None:
            return None
        now = clock.now()
        return key if any(one.digest == presented and one.accepted(now) for one in key.secrets) else None

    def known_owner(self, owner: str) -> bool:
        """Whether a key with these sessions is still accepted."""
        key = self._by_owner.get(owner) or self._by_digest.get(owner)
        return self.open or (key is not None and bool(key.accepted_secrets(clock.now())))

    def limits_of(self, owner: str) -> KeyLimits:
        key = self._by_owner.get(owner)
        return NO_LIMITS if key is None else key.limits

    # Use

    def note_use(self, key: ApiKey) -> None:
        """The present request has this key."""
        log_ids().key = key.name
        self._unshared[key.name].at = clock.now()

    def spend(self, owner: str, tokens: int) -> None:
        """Count the tokens of a call for the key that owns its session."""
        if (key := self._by_owner.get(owner)) is not None:
            usage = self._unshared[key.name]
            usage.tokens += tokens
            usage.at = usage.at or clock.now()

    def left(self, owner: str) -> int | None:
        """How many tokens the key's budget has left; None if it has none."""
        key = self._by_owner.get(owner)
        if key is None or key.limits.token_budget is None:
            return None
        own = sum(each[key.name].tokens for each in (self._unshared, self._sharing) if key.name in each)
        return max(0, key.limits.token_budget - self._spent.get(key.name, 0) - own)

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
        usage, self._unshared = self._unshared, defaultdict(KeyUse)
        self._sharing = usage
        # A budget that other gateways use is read with no usage of this gateway's own.
        asked = {key.name: KeyUse() for key in self.all if key.limits.token_budget is not None} | usage
        try:
            before, self._spent = self._spent, await store.add_usage(asked)
            if any(tokens < before.get(name, 0) for name, tokens in self._spent.items()):
                await store.note_lost_use()
        except StorageUnavailable:
            for name, each in usage.items():
                later = self._unshared[name]
                later.tokens += each.tokens
                later.at = max(later.at, each.at)
            raise
        finally:
            self._sharing = {}


DIGEST = re.compile(r"[0-9a-f]{64}")


class WrongKeyFile(ValueError):
    """The file with the keys cannot be used. The message never quotes a secret."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    role: Role = "client"
    secrets: tuple[str, ...] = ()
    secrets_sha256: tuple[str, ...] = ()
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    token_budget: Limit | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[_Entry, ...] = ()


def keys_of_file(path: Path) -> tuple[ApiKey, ...]:
    """The keys of the file. Raises WrongKeyFile that names the file and what is wrong with it."""
    try:
        entries = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")) or {}, _File).keys
    except OSError as error:
        raise WrongKeyFile(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:  # its text would quote the file, and so a secret
        raise WrongKeyFile(f"{path} is not YAML{_line(error)}") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise WrongKeyFile(f"{path}: {error}") from error
    for entry in entries:
        _check(path, entry)
    doubled = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if doubled:
        raise WrongKeyFile(f"{path} has several keys with the name {doubled[0]}")
    return tuple(_key(entry) for entry in entries)


def _check(path: Path, entry: _Entry) -> None:
    if not NAME.fullmatch(entry.name):
        raise WrongKeyFile(f"{path}: a key's name has 1 to 63 letters, digits, dots, dashes, underscores")
    if not entry.secrets and not entry.secrets_sha256:
        raise WrongKeyFile(f"{path}: the key {entry.name} has no secret")
    if not all(map(is_secret, entry.secrets)):
        raise WrongKeyFile(f"{path}: a secret of the key {entry.name} is empty, or asterisks alone")
    if not all(DIGEST.fullmatch(each) for each in entry.secrets_sha256):
        raise WrongKeyFile(f"{path}: secrets_sha256 of the key {entry.name} are not SHA-256 in hex")


def _key(entry: _Entry) -> ApiKey:
    digests = [*map(digest, entry.secrets), *entry.secrets_sha256]
    limits = KeyLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.token_budget)
    return ApiKey(entry.name, entry.role, tuple(map(Secret, digests)), limits, "file")


def _line(error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return "" if mark is None else f" (line {mark.line + 1})"


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
