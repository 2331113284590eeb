"""Keys of clients, operators and services: compared in constant time, never logged or stored in the clear."""

import hashlib
import hmac
import logging
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from rollout_queue.http.errors import ApiError
from rollout_queue.signals.log_ids import log_ids

logger = logging.getLogger(__name__)

ServiceRole = Literal["rollout_server", "trainer"]
"""Services that have a key of their own, which opens only what that service needs."""
Role = Literal["client", "admin", ServiceRole]
DEFAULT_KEYS = ("dev-client-key", "dev-admin-key")
"""Keys of examples, which everybody knows."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str | None) -> dict[str, str]:
    """The header that presents a key; no header without one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries: `Authorization: Bearer …`, else `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key")


class Keyring:
    """The keys of a service and their roles. Without any key the service is open, and may bind loopback
    only."""

    def __init__(
        self,
        client_keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        rollout_server_key: str | None = None,
    ) -> None:
        self._roles: dict[str, Role] = {digest(key): "client" for key in client_keys}
        if rollout_server_key is not None:
            self._roles[digest(rollout_server_key)] = "rollout_server"
        self._roles |= {digest(key): "admin" for key in admin_keys}

    @property
    def defaults(self) -> tuple[str, ...]:
        """The keys of DEFAULT_KEYS that this service accepts."""
        return tuple(key for key in DEFAULT_KEYS if digest(key) in self._roles)

    @property
    def open(self) -> bool:
        return not self._roles

    def role_of(self, key: str | None) -> Role | None:
        """The role of `key`; None for an unknown key. Every caller is admin when no key is set."""
        if self.open:
            return "admin"
        if key is None:
            return None
        found, presented = None, digest(key)
        for known, role in self._roles.items():  # all keys, so that the time does not depend on the match
            if hmac.compare_digest(known, presented):
                found = role
        return found

    def caller(self, headers: Mapping[str, str]) -> Role:
        """The role of whoever sent a request. Raises ApiError 401 for no key, or an unknown one."""
        key = presented_key(headers)
        role = self.role_of(key)
        log_ids().key = role
        if role is None:
            raise ApiError(401, "no API key was given" if key is None else "the API key is not known")
        return role


class Keys(Protocol):
    """The keys that a service accepts."""

    @property
    def open(self) -> bool:
        """Whether there is no key, so that every caller is an admin."""
        ...

    @property
    def defaults(self) -> tuple[str, ...]:
        """The keys of DEFAULT_KEYS among them."""
        ...


def refuse_open_binding(host: str, keyring: Keys) -> None:
    """Raises SystemExit when a service without keys would listen to other machines; warns of default keys."""
    if keyring.open and host not in LOOPBACK:
        raise SystemExit(
            f"refusing to listen on {host} without keys: set WEIR_CLIENT_KEYS and WEIR_ADMIN_KEYS, "
            "or bind 127.0.0.1"
        )
    if keyring.defaults:
        logger.warning(default_keys_sentence(keyring.defaults))


def default_keys_sentence(defaults: Iterable[str]) -> str:
    return f"everybody knows the keys {', '.join(defaults)}: set WEIR_CLIENT_KEYS and WEIR_ADMIN_KEYS"
