"""An API key: a name with a role, several secrets and limits of its own. Only digests of secrets are kept.

Keys in Redis may have fields of a newer build, which this one ignores.
"""

import re
from typing import Annotated, Literal

import msgspec

from rollout_queue.http.keys import Role, digest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""A name is shorter than a digest, so that no name is the owner of another key's sessions."""
Source = Literal["settings", "file", "admin"]
"""`settings`: a key of the section `gateway`; `file`: `keys_file`; `admin`: `POST /admin/keys`."""
Limit = Annotated[int, msgspec.Meta(ge=1)]


class Secret(msgspec.Struct, frozen=True):
    """One secret of a key. A key has several while its users change from one to the next."""

    digest: str
    """SHA-256 of the secret, in hex."""
    created_at: float = 0.0
    expires_at: float | None = None
    """Seconds since the epoch; the secret is not accepted any more from then on. None: it does not expire."""

    def accepted(self, now: float) -> bool:
        return self.expires_at is None or now < self.expires_at


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


def plain_key(secret: str, role: Role) -> ApiKey:
    """A key of the settings, which have a secret and no name."""
    hashed = digest(secret)
    return ApiKey(f"key-{hashed[:8]}", role, (Secret(hashed),), source="settings")
