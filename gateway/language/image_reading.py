"""Reads the images of a call: from the request, from a listed host or from the store, decoded once.

messages with addresses ──▶ messages with hashes and sizes, and the PNGs by hash

Fetches images that a request names by an address, from the hosts that the operator has listed.

Any other host is refused. So is an address inside the operator's network, even if a listed host has it, and a
redirect: a client must not make the gateway read what only the gateway can reach.
"""

import asyncio
import errno
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from gateway.errors import invalid
from gateway.language.image_decoding import ClientImage, Png, SharedDecodes, image_of, png_of, too_large
from gateway.language.image_pads import IMAGE, Vision, image_parts
from gateway.settings import ImageSettings
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
                    raise invalid(where, f"its host answered with status {response.status}")
                return await self._read(response, where)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise invalid(where, f"the image cannot be fetched: {str(error)[:200] or 'timeout'}") from error

    def _check(self, url: str, where: str) -> None:
        """Raises InvalidRequest for an address that is not on the list."""
        try:
            parts = urlsplit(url)
            host, port, scheme = (parts.hostname or "").lower(), parts.port, parts.scheme
        except ValueError as error:
            raise invalid(where, "not an address") from error
        if scheme not in DEFAULT_PORTS:
            raise invalid(where, "send the image as a data URL")
        bracketed = f"[{host}]" if ":" in host else host
        names = {f"{bracketed}:{port or DEFAULT_PORTS[scheme]}"}
        if port in (None, DEFAULT_PORTS[scheme]):
            names |= {host, bracketed}
        if self._hosts.isdisjoint(names):
            raise invalid(where, "images are not fetched from this host; send a data URL")
        if parts.username is not None or parts.password is not None:
            raise invalid(where, "an address with a password")
        try:
            literal = ipaddress.ip_address(host)
        except ValueError:
            return
        if not self._allows(str(literal)):
            raise invalid(where, "not a public address")

    async def _read(self, response: aiohttp.ClientResponse, where: str) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_chunked(CHUNK_BYTES):
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise too_large(where, self._max_bytes)
        return b"".join(parts)


READERS = 2
"""How many images are made bytes and hashed at the same time. These threads are others than the decoders', so
that an image that was read before does not wait for images that are decoded."""
DECODERS = 2
"""How many images are decoded at the same time: one of many pixels takes much memory."""

Message = dict[str, Any]
Stored = Callable[[Collection[str]], Awaitable[Mapping[str, bytes]]]
"""The images in the store, by hash."""


class ReadImages(NamedTuple):
    """A call's messages, and the bytes of their images."""

    messages: Sequence[Message]
    pngs: Mapping[str, bytes]
    """By hash."""


class ImageReader:
    """Reads images for one model. It keeps the last ones, since agents send them with every call."""

    def __init__(
        self,
        vision: Vision | None,
        settings: ImageSettings,
        context_length: int,
        stored: Stored,
        fetcher: ImageFetcher | None = None,
    ) -> None:
        self._vision, self._settings, self._stored = vision, settings, stored
        self._context_length = context_length
        self._fetcher = fetcher or ImageFetcher(settings.hosts, settings.max_bytes, settings.fetch_timeout_s)
        self._kept: OrderedDict[bytes, Png] = OrderedDict()
        """By the digest of the client's bytes, the oldest first."""
        self._kept_bytes = 0
        self._decodes = SharedDecodes()
        self._readers = ThreadPoolExecutor(READERS, "image-reader")
        self._decoders = ThreadPoolExecutor(DECODERS, "decoder")

    async def read(self, messages: Sequence[Message], count: Callable[[int], None]) -> ReadImages:
        """The messages with hashes in place of addresses. Calls `count` with the bytes of each image before
        the next one is decoded; it may raise.

        Raises InvalidRequest; StorageUnavailable if images of an earlier response cannot be read.
        """
        parts = list(image_parts(messages))
        if not parts:
            return ReadImages(messages, {})
        if self._vision is None:
            raise invalid("messages", "this model reads text, not images")
        if len(parts) > self._settings.max_images:
            message = f"{len(parts)} images; a conversation has at most {self._settings.max_images}"
            raise invalid(str(parts[-1].get("where", "messages")), message)
        known = {part["sha256"] for part in parts if "sha256" in part}
        pngs = dict(await self._stored(known)) if known else {}
        if missing := known - pngs.keys():
            raise invalid("messages", f"image {min(missing)} of an earlier response is no longer stored")
        count(sum(map(len, pngs.values())))
        left, read = self._context_length, dict[int, dict[str, Any]]()
        for part in parts:
            if "sha256" not in part:
                png = await self._png(part["url"], part["where"], self._vision, left)
                left -= self._vision.tokens(png.image.width, png.image.height)
                if png.image.sha256 not in pngs:
                    count(len(png.data))
                pngs[png.image.sha256] = png.data
                read[id(part)] = png.image.part
        return ReadImages([_with_hashes(message, read) for message in messages], pngs)

    def clear(self) -> None:
        """Forget the images, because the sessions that show them may have been deleted."""
        self._kept.clear()
        self._kept_bytes = 0

    def close(self) -> None:
        for threads in (self._readers, self._decoders):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _png(self, url: str, where: str, vision: Vision, max_tokens: int) -> Png:
        """The image at the address. One that was read before is not decoded again."""
        settings, loop = self._settings, asyncio.get_running_loop()
        if url[:5].lower() == "data:":
            sent = await loop.run_in_executor(self._readers, image_of, url, where, settings.max_bytes)
        else:
            data = await self._fetcher.fetch(url, where)
            sent = await loop.run_in_executor(self._readers, ClientImage.of, data)
        if (png := self._kept.get(sent.digest)) is None:
            decode = partial(png_of, sent.data, where, vision, settings.max_pixels, max_tokens)
            png = await self._decodes.png(sent.digest, lambda: loop.run_in_executor(self._decoders, decode))
        self._keep(sent.digest, png)
        return png

    def _keep(self, digest: bytes, png: Png) -> None:
        if (former := self._kept.pop(digest, None)) is not None:
            self._kept_bytes -= len(former.data)
        self._kept[digest] = png
        self._kept_bytes += len(png.data)
        while self._kept_bytes > self._settings.cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest.data)


def _with_hashes(message: Message, read: Mapping[int, dict[str, Any]]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [read.get(id(part), part) for part in content]}


def image_part(url: Any, where: str) -> dict[str, Any]:
    """The part of a message's content for an image at this address, until it is read. Raises InvalidRequest
    if that is no text."""
    if not isinstance(url, str) or not url:
        raise invalid(where, "not an address")
    return {"type": IMAGE, "url": url, "where": where}
