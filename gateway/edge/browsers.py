"""Recognizes requests that another web site has a browser send.

Another site cannot read a key, so a gateway with keys needs this for the page's cookie only. A gateway
without keys answers every process of its machine, and a browser there runs programs of every site.

cross-site request   browsers mark it: `Sec-Fetch-Site`, and older ones `Origin`
DNS rebinding        the site gives its own name the address of this machine, so `Host` names the site

Browsers send `Sec-Fetch-Site` to https addresses and to loopback addresses. A request without a mark is no
browser's, or one of the same site.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from gateway.errors import NotPermitted

OWN_SITES = frozenset({"same-origin", "none"})
"""Values of `Sec-Fetch-Site`: a page of this gateway asks, or the user, by the address bar."""


class OtherSite(NotPermitted):
    """Another web site had a browser send the request."""


def host_of(address: str) -> str:
    """The host in `host:port`, in lower case and without brackets; empty if it has none."""
    try:
        return (urlsplit(f"//{address}").hostname or "").rstrip(".")
    except ValueError:  # brackets that do not match
        return ""


def is_loopback(host: str) -> bool:
    """Whether the host is this machine, whatever name server is asked."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def public_hosts(public_url: str | None) -> frozenset[str]:
    """`host[:port]` of the public URL."""
    return frozenset() if public_url is None else frozenset({urlsplit(public_url).netloc.lower()})


def check_site(headers: Mapping[str, str], hosts: Iterable[str], *, changes: bool) -> None:
    """Raises OtherSite if the request comes from a page of another origin.

    `hosts`: `host[:port]` at which the gateway is known, beside the one that the request names. `changes`:
    the request may change something, so it needs a mark that it is of the same origin.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        # The browser knows the origin of both sides, also behind a proxy that changes `Host`.
        if site == "same-origin" or (site in OWN_SITES and not changes):
            return
        raise OtherSite(f"another web site sent this request (Sec-Fetch-Site: {site})", code="other_site")
    if origin is None:
        if changes:
            raise OtherSite("the request has neither Sec-Fetch-Site nor Origin", code="other_site")
        return
    own = {headers.get("host", "").lower(), *hosts}
    if urlsplit_netloc(origin) not in own:
        raise OtherSite(f"another web site sent this request (Origin: {origin[:200]})", code="other_site")


def urlsplit_netloc(origin: str) -> str:
    """`host[:port]` of an origin; empty for `null`, and for what is no origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def check_keyless(headers: Mapping[str, str], hosts: frozenset[str], *, page: bool) -> None:
    """Raises OtherSite if a gateway without keys must not answer this request.

    `hosts`: as in `check_site`. `page`: the request is a GET of the page itself, to which other sites may
    link.
    """
    host = headers.get("host", "").lower()
    named = host_of(host)
    if named and not is_loopback(named) and host not in hosts:
        raise OtherSite(
            "a gateway without keys answers at loopback addresses and at gateway.public_url only, not as "
            f"{host[:200]}",
            code="other_host",
        )
    marked = "sec-fetch-site" in headers or "origin" in headers
    if marked and not page:
        check_site(headers, hosts, changes=False)
