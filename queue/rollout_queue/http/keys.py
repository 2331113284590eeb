"""Client keys and admin keys: who is calling, compared in constant time, never logged or stored in clear."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Literal

from starlette.requests import Request

from rollout_queue.http.errors import ApiError

Role = Literal["client", "admin"]
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries: `Authorization: Bearer …`, else `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key")


class Keyring:
    """Which key opens what. Without any key the service is open, and may bind loopback only."""

    def __init__(self, client_keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        self._roles: dict[str, Role] = {digest(key): "client" for key in client_keys}
        self._roles |= {digest(key): "admin" for key in admin_keys}

    @property
    def open(self) -> bool:
        return not self._roles

    def role_of(self, key: str | None) -> Role | None:
        """The role that `key` has; None for a key that is not ours. Everybody is admin when no key is set."""
        return self.known(None if key is None else digest(key))

    def known(self, presented: str | None) -> Role | None:
        """The same for the digest of a key."""
        if self.open:
            return "admin"
        if presented is None:
            return None
        found = None
        for known, role in self._roles.items():  # every key is compared, so that time tells nothing
            if hmac.compare_digest(known, presented):
                found = role
        return found

    def require_admin(self, request: Request) -> None:
        """Raises 401 for no or an unknown key, 403 for a client's."""
        key = presented_key(request.headers)
        role = self.role_of(key)
        if role is None:
            raise ApiError(401, "no API key was given" if key is None else "the API key is not known")
        if role != "admin":
            raise ApiError(403, "this path needs an admin key")


def refuse_open_binding(host: str, keyring: Keyring) -> None:
    """Raises SystemExit when a service without keys would be reachable from other machines."""
    if keyring.open and host not in LOOPBACK:
        raise SystemExit(
            f"refusing to listen on {host} without keys: set WEIR_CLIENT_KEYS and WEIR_ADMIN_KEYS, "
            "or bind 127.0.0.1"
        )
