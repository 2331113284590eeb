"""Recognizes requests that another web site has a browser send.

Another site cannot read a key, so a service with keys needs this for the page's cookie only. A service
without keys answers every process of its machine, and a browser there runs programs of every site.

cross-site request   browsers mark it: `Sec-Fetch-Site`, and older ones `Origin`
DNS rebinding        the site gives its own name the address of this machine, so `Host` names the site

Browsers send `Sec-Fetch-Site` to https addresses and to loopback addresses. A request without a mark is no
browser's, or one of the same site.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from starlette.types import Scope

from rollout_queue.http.errors import ApiError

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
