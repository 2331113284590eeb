"""Fetches images that a request names by an address, from the hosts that the operator has listed.

Any other host is refused. So is an address inside the operator's network, even if a listed host has it, and a
redirect: a client must not make the gateway read what only the gateway can reach.
"""

import errno
import ipaddress
import socket
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from gateway.language.images.decoding import refusal, too_large
from rollout_queue import clock

DEFAULT_PORTS = {"http": 80, "https": 443}
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that stand for IPv4 addresses in networks without IPv4 (RFC 6052)."""
TRANSLATED = (ipaddress.IPv6Network("64:ff9b:1::/48"), ipaddress.IPv6Network("2002::/16"))
"""Addresses of a network's own translator (RFC 8215), and of 6to4, which nobody uses any more (RFC 7526)."""
CHUNK_BYTES = 64 * 2**10


def is_public(address: str) -> bool:
    """Whether the address can be reached from everywhere, and leads nowhere else: a translator sends a packet
    on to the IPv4 address that is part of it."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found in NAT64:
            found = ipaddress.IPv4Address(found.packed[-4:])
        elif any(found in network for network in TRANSLATED):
            return False
    return found.is_global and not found.is_multicast


class PublicResolver(AbstractResolver):
    """Resolves names to public addresses only, so that the checked address is the one that is used."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = [
            each for each in await self._resolver.resolve(host, port, family) if self._allows(each["host"])
        ]
        if not found:
            raise OSError(errno.EHOSTUNREACH, f"{host} has no public address")
        return found

    async def close(self) -> None:
        await self._resolver.close()


class ImageFetcher:
    """Fetches images over HTTP. `allows` says which addresses may be connected to."""

    def __init__(
        self,
        hosts: Collection[str],
        max_bytes: int,
        timeout_s: float,
        allows: Callable[[str], bool] = is_public,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._allows = allows

    async def fetch(self, url: str, where: str) -> bytes:
        """The bytes at the address. Raises InvalidRequest that names the field `where`."""
        self._check(url, where)
        # No cookies, no proxy of the environment, no connection that is kept: requests share nothing.
        timeout = aiohttp.ClientTimeout(total=None)  # it would count time in which this process stood still
        connector = aiohttp.TCPConnector(resolver=PublicResolver(self._allows), force_close=True)
        try:
            async with (
                clock.real_timeout(self._timeout_s),
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(url, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise refusal(where, f"its host answered with status {response.status}")
                return await self._read(response, where)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise refusal(where, f"the image cannot be fetched: {str(error)[:200] or 'timeout'}") from error

    def _check(self, url: str, where: str) -> None:
        """Raises InvalidRequest for an address that is not on the list."""
        try:
            parts = urlsplit(url)
            host, port, scheme = (parts.hostname or "").lower(), parts.port, parts.scheme
        except ValueError as error:
            raise refusal(where, "not an address") from error
        if scheme not in DEFAULT_PORTS:
            raise refusal(where, "send the image as a data URL")
        bracketed = f"[{host}]" if ":" in host else host
        names = {f"{bracketed}:{port or DEFAULT_PORTS[scheme]}"}
        if port in (None, DEFAULT_PORTS[scheme]):
            names |= {host, bracketed}
        if self._hosts.isdisjoint(names):
            raise refusal(where, "images are not fetched from this host; send a data URL")
        if parts.username is not None or parts.password is not None:
            raise refusal(where, "an address with a password")
        try:
            literal = ipaddress.ip_address(host)
        except ValueError:
            return
        if not self._allows(str(literal)):
            raise refusal(where, "not a public address")

    async def _read(self, response: aiohttp.ClientResponse, where: str) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_chunked(CHUNK_BYTES):
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise too_large(where, self._max_bytes)
        return b"".join(parts)
