"""Says who calls, by the key of the call; and for which user, by its body.

A caller is an admin or a client; a session key permits one session.

A session key is `sess-{session id, base64}.{mark of the key that opened the session}.{signature}`. It is
computed from the session, and never stored. The mark is missing where an admin has opened the session, and in
keys that older releases made.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol, get_args

import msgspec

from gateway.callers.api_keys import ApiKeys
from gateway.callers.key_store import ApiKey
from gateway.errors import NotPermitted, UnknownCaller
from rollout_queue.contract.records import SessionSpec
from rollout_queue.http.callers import Role, ServiceRole, digest, presented_key
from rollout_queue.protocol.message import ID
from rollout_queue.service_log import log_ids

SERVICE_ROLES: frozenset[Role] = frozenset(get_args(ServiceRole))
PREFIX = "sess-"
TINKER_PREFIX = "tml-"
"""The Tinker SDK takes only keys that begin so: any key of Weir may be given to it with this before it."""
SCOPE = 16
"""Characters after the `~` of a scoped id."""


class Owned(Protocol):
    """What belongs to a session, and to the client key that opened it."""

    @property
    def session_id(self) -> str: ...
    @property
    def owner(self) -> str: ...


class Named(Owned, Protocol):
    """A session or its tombstone."""

    @property
    def name(self) -> str | None: ...


def names(name: str, session_id: str) -> bool:
    """Whether `name` is the stored id `session_id`, or the name from which `Identities.scoped` made it."""
    scoped = session_id.startswith(f"{name}~") and len(session_id) == len(name) + 1 + SCOPE
    return scoped or session_id == name


class Caller(msgspec.Struct, frozen=True):
    """Who sent a request. `owner` is what a client key's sessions have as their owner: the key's name, or the
    digest of a key without a name. It is empty for admins and session keys."""

    role: Role
    owner: str
    session_id: str | None = None
    """Set for a session key: the stored id of the one session that the key permits."""
    key: str = ""
    """The name of the client or admin key, for operators."""
    former: str | None = None
    """The digest of the caller's secret: the owner of sessions that it opened before it had a name."""
    mark: str = ""
    """Of a session key: the mark of the owner of its session (`mark_of`)."""

    @property
    def payer(self) -> tuple[str, str]:
        """For whom the caller's memory and work count: all sessions of a key count for the key."""
        if self.session_id is not None:
            return ("client", self.mark) if self.mark else ("session", self.session_id)
        return ("client", mark_of(self.owner)) if self.owner else (self.role, self.key)

    def owns(self, thing: Owned) -> bool:
        """Whether the caller may use the session, tombstone or response."""
        if self.session_id is not None:
            return thing.session_id == self.session_id
        return self.role == "admin" or thing.owner in (self.owner, self.former)

    def shown_id(self, thing: Named) -> str:
        """The id by which the caller knows the session. Admins know all sessions by their stored ids."""
        return thing.session_id if self.role == "admin" else thing.name or thing.session_id

    def shown_group(self, spec: SessionSpec) -> str | None:
        """The id by which the caller knows the session's group. Admins know all by their stored ids."""
        return spec.group_id if self.role == "admin" else spec.shown_group


@lru_cache(maxsize=4096)
def mark_of(owner: str) -> str:
    """What a session key says of its session's owner: the same for all sessions of one client key."""
    return hashlib.sha256(owner.encode()).hexdigest()[:SCOPE]


def no_session_key(caller: Caller) -> Caller:
    """The caller. Raises NotPermitted for a session key."""
    if caller.session_id is not None:
        raise NotPermitted("a session key permits the calls of its session and nothing else")
    return caller


class Identities:
    """Finds the caller of a key, and makes the keys of sessions."""

    def __init__(self, keys: ApiKeys, secret: bytes) -> None:
        self.keys = keys
        self._secret = secret

    def scoped(self, name: str, owner: str) -> str:
        """The stored id of a session or group that `owner` calls `name`, where that is another key's one.

        No client can make such an id, because it is signed.
        """
        signed = hmac.new(self._secret, b"owner\0" + owner.encode(), hashlib.sha256)
        return f"{name}~{signed.hexdigest()[:SCOPE]}"

    def session_key(self, session_id: str, owner: str) -> str:
        """The key of a session that this client key has opened; `owner` is empty for an admin's session."""
        name = base64.urlsafe_b64encode(session_id.encode()).decode().rstrip("=")
        marks = [mark_of(owner)] if owner else []
        return PREFIX + ".".join([name, *marks, self._signature(session_id, *marks)])

    def thought_signature(self, thought: str) -> str:
        """The signature that proves that the model wrote the thought; no client can make one."""
        signed = hmac.digest(self._secret, b"thought\0" + thought.encode(errors="replace"), "sha256")
        return base64.b64encode(signed).decode()

    def file_signature(self, path: str, expires_at: int) -> str:
        """The signature that lets anyone read the file at this path of a URL until `expires_at`, in seconds
        since the epoch."""
        signed = f"{expires_at}\0{path}".encode(errors="replace")
        return hmac.digest(self._secret, b"file\0" + signed, "sha256").hex()

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller of a request. Raises UnknownCaller if the key is missing or not known, and NotPermitted
        for the key of a service."""
        key = presented_key(headers)
        if key is not None and key.startswith(PREFIX):
            found = self._session_of(key)
            if found is None:
                raise UnknownCaller("the session key is not valid")
            log_ids().key = "session"
            return found
        if self.keys.open:
            return Caller("admin", "")
        presented, known = ("", None) if key is None else self._accepted(key)
        if known is None:
            raise UnknownCaller("no API key was given" if key is None else "the API key is not known")
        if known.role in SERVICE_ROLES:
            self.keys.note_use(known)
            raise NotPermitted("the key of a service permits only what the service needs")
        return self._caller(presented, known)

    def accepted_digest(self, key: str) -> str | None:
        """The digest by which an API key is known; None for a key that is not accepted."""
        presented, known = self._accepted(key)
        return None if known is None else presented

    def with_digest(self, presented: str) -> Caller | None:
        """The client or operator whose API key has this digest; None if no such key is accepted."""
        known = self.keys.find(presented)
        return None if known is None or known.role in SERVICE_ROLES else self._caller(presented, known)

    def _accepted(self, key: str) -> tuple[str, ApiKey | None]:
        """The digest by which an API key is known, and what is known by it."""
        if (known := self.keys.find(presented := digest(key))) is None and key.startswith(TINKER_PREFIX):
            known = self.keys.find(presented := digest(key.removeprefix(TINKER_PREFIX)))
        return presented, known

    def _caller(self, presented: str, known: ApiKey) -> Caller:
        self.keys.note_use(known)
        if known.role == "admin":
            return Caller("admin", "", key=known.name)
        return Caller("client", known.owner, key=known.name, former=presented)

    def service(self, headers: Mapping[str, str]) -> ServiceRole | None:
        """The service that presents its key with a request; None if the key is no service's."""
        key = presented_key(headers)
        known = None if key is None else self.keys.find(digest(key))
        if known is None or known.role == "client" or known.role == "admin":
            return None
        self.keys.note_use(known)
        return known.role

    def client(self, headers: Mapping[str, str]) -> Caller:
        """A caller who may open sessions and reward them. Raises NotPermitted for a session key."""
        return no_session_key(self.caller(headers))

    def _session_of(self, key: str) -> Caller | None:
        """The caller that a session key names; None for a key that this deployment has not made."""
        name, _, rest = key.removeprefix(PREFIX).partition(".")
        *marks, signature = rest.split(".", 1)
        try:
            session_id = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except ValueError:  # not base64, or not UTF-8
            return None
        genuine = hmac.compare_digest(signature.encode(), self._signature(session_id, *marks).encode())
        return Caller("client", "", session_id, mark="".join(marks)) if genuine else None

    def _signature(self, session_id: str, *marks: str) -> str:
        signed = "\0".join([session_id, *marks])
        return hmac.new(self._secret, signed.encode(), hashlib.sha256).hexdigest()[:40]


CLAUDE_CODE = re.compile(r"user_.*_session_([0-9a-f-]{36})")
"""Claude Code's `metadata.user_id`. It names an installation and a session, and no user."""


def user_named(name: Any) -> str | None:
    """The name if it has the form of an id (`protocol.message.ID`); else None."""
    return name if isinstance(name, str) and ID.fullmatch(name) else None


def user_in_metadata(metadata: Mapping[str, Any]) -> str | None:
    """The user named by Anthropic's `metadata.user_id`."""
    name = user_named(metadata.get("user_id"))
    return None if name is None or CLAUDE_CODE.fullmatch(name) else name
