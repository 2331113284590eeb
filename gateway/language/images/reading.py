"""Reads the images of a call: from the request, from a listed host or from the store, decoded once.

messages with addresses ──▶ messages with hashes and sizes, and the PNGs by hash
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from gateway.errors import InvalidRequest
from gateway.language.images.decoding import ClientImage, Png, image_of, png_of, refusal
from gateway.language.images.fetching import ImageFetcher
from gateway.language.images.pads import IMAGE, image_parts
from gateway.language.images.shared_decodes import SharedDecodes
from gateway.language.images.vision import Vision
from gateway.settings import ImageSettings

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
            raise InvalidRequest("messages: this model reads text, not images", param="messages")
        if len(parts) > self._settings.max_images:
            message = f"{len(parts)} images; a conversation has at most {self._settings.max_images}"
            raise refusal(str(parts[-1].get("where", "messages")), message)
        known = {part["sha256"] for part in parts if "sha256" in part}
        pngs = dict(await self._stored(known)) if known else {}
        if missing := known - pngs.keys():
            message = f"messages: image {min(missing)} of an earlier response is no longer stored"
            raise InvalidRequest(message, param="messages")
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
        raise refusal(where, "not an address")
    return {"type": IMAGE, "url": url, "where": where}
