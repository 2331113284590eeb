"""Refuses requests that a service must not serve, before a byte of their bodies is read.

without keys   what another web site has a browser send: 403
with keys      what comes without a known key, except to a few paths: 401; with a key of no use here: 403

Keys are compared in constant time, and never logged or stored in the clear.

Another site cannot read a key, so a service with keys needs this for the page's cookie only. A service
without keys answers every process of its machine, and a browser there runs programs of every site.

cross-site request   browsers mark it: `Sec-Fetch-Site`, and older ones `Origin`
DNS rebinding        the site gives its own name the address of this machine, so `Host` names the site

Browsers send `Sec-Fetch-Site` to https addresses and to loopback addresses. A request without a mark is no
browser's, or one of the same site.
"""

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Iterable, Mapping, Set
from typing import Literal, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_queue.http.errors import ApiError
from rollout_queue.service_log import log_ids

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


OWN_SITES = frozenset({"same-origin", "none"})
"""Values of `Sec-Fetch-Site`: a page of this service asks, or the user, by the address bar."""
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+?)\.?)(?::\d*)?", re.IGNORECASE)
"""The header `Host`: the host without brackets and without a last dot, and perhaps a port."""
PROBES = frozenset({"/live", "/ready", "/health"})
"""Paths that orchestrators call by the address of a pod. No site can have an address as its name."""


class OtherSite(ApiError):
    """Another web site had a browser send the request."""

    def __init__(self, message: str, code: str = "other_site") -> None:
        super().__init__(403, message, code=code)


def host_of(address: str) -> str:
    """The host in `host:port`, in lower case and without brackets; empty if it is no such text."""
    found = HOST.fullmatch(address)
    return (found[1] or found[2]).lower() if found else ""


def is_loopback(host: str) -> bool:
    """Whether the host is this machine, whatever name server is asked."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def public_hosts(public_url: str | None) -> frozenset[str]:
    """`host[:port]` of the public URL."""
    return frozenset() if public_url is None else frozenset({urlsplit(public_url).netloc.lower()})


def check_site(headers: Mapping[str, str], hosts: Iterable[str], *, changes: bool) -> None:
    """Raises OtherSite if the request comes from a page of another origin.

    `hosts`: `host[:port]` at which the service is known, beside the one that the request names. `changes`:
    the request may change something, so it needs a mark that it is of the same origin.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        # The browser knows the origin of both sides, also behind a proxy that changes `Host`.
        if site == "same-origin" or (site in OWN_SITES and not changes):
            return
        raise OtherSite(f"another web site sent this request (Sec-Fetch-Site: {site[:200]})")
    if origin is None:
        if changes:
            raise OtherSite("the request has neither Sec-Fetch-Site nor Origin")
        return
    sender = _netloc(origin)
    if not sender or sender not in {headers.get("host", "").lower(), *hosts}:
        raise OtherSite(f"another web site sent this request (Origin: {origin[:200]})")


def check_keyless(scope: Scope, hosts: frozenset[str], *, linked: bool = False) -> None:
    """Raises OtherSite if a service without keys must not answer this request.

    `hosts`: as in `check_site`. `linked`: the request is a GET of a page without data, to which other sites
    may link.
    """
    headers = _joined(scope)
    if (named := headers.get("host")) is not None:  # clients of HTTP/1.0 send none, and browsers always do
        host = host_of(named)
        own = is_loopback(host) or (host and host in map(host_of, hosts))
        if not own and not (scope["path"] in PROBES and _is_address(host)):
            raise OtherSite(
                "a service without keys answers at loopback addresses and at its public_url only, not as "
                f"{named[:200]!r}",
                "other_host",
            )
    if not linked and ("sec-fetch-site" in headers or "origin" in headers):
        check_site(headers, hosts, changes=False)


def _joined(scope: Scope) -> dict[str, str]:
    """The headers by name. One that is sent twice is one text with both, which names no host and no site."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:  # a name
        return False
    return True


def _netloc(origin: str) -> str:
    """`host[:port]` of an origin; empty for `null`, and for what is no origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


OPEN = PROBES | {"/metrics", "/openapi.json", "/docs", "/docs/style.css"}
"""Paths that are read without a key: they tell nothing of what the service works on."""
READS = frozenset({"GET", "HEAD"})
ROLE = "role"
"""Where the scope's state has the caller's role, except on open paths of a service with keys."""


class CallerCheck:
    """ASGI middleware in front of every route of a service. Routes ask `role_in` who calls."""

    def __init__(
        self, app: ASGIApp, keyring: Keyring, callers: Set[Role], public_url: str | None = None
    ) -> None:
        """`callers`: the roles for which there is any route."""
        self._app, self._keyring, self._callers = app, keyring, callers
        self._hosts = public_hosts(public_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError 401 and 403."""
        if self._keyring.open:
            check_keyless(scope, self._hosts)
        elif scope["path"] in OPEN and scope["method"] in READS:
            return
        role = self._keyring.caller(Headers(scope=scope))
        if role not in self._callers:
            raise _needs_admin()
        scope.setdefault("state", {})[ROLE] = role


def role_in(request: Request) -> Role:
    """The role of the caller whom `CallerCheck` let in."""
    role: Role = request.scope["state"][ROLE]
    return role


async def admins_only(request: Request) -> None:
    """Raises ApiError 403 for callers with another key than an operator's."""
    if role_in(request) != "admin":
        raise _needs_admin()


def _needs_admin() -> ApiError:
    return ApiError(403, "this path needs an admin key")
