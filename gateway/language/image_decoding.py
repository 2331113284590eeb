"""Decodes an image once, for the engine and the trainer alike.

bytes of a client ──▶ PNG in RGB, of the size that the model reads

A JPEG has no exact pixels: decoders differ. So do the ways in which libraries resize, and drop transparency.

Counts the scans of a JPEG, each of which costs a pass over the whole picture.

A scan may have ten bytes: a file of a few megabytes would keep a decoder busy for hours.

Decodes an image once for all calls that show it at the same time, such as the sessions of a group.
"""

import asyncio
import base64
import binascii
import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from gateway.errors import InvalidRequest, invalid
from gateway.language.image_pads import DecodedImage, Vision

MOST_SCANS = 64
"""Encoders write up to 18: those of Pillow for CMYK. A scan of 2²⁵ pixels takes most of a second."""
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""What is between markers has no other 0xff. Those of restarts, d0 to d7, belong to a scan's data."""
SCAN, END = 0xDA, 0xD9
WITH_LENGTH = frozenset({*range(0xC0, 0xD0), *range(0xDA, 0xDE), *range(0xE0, 0xF0), 0xFE})
"""Markers that a segment follows, which begins with its own length. Its bytes may look like markers: that of
a preview has scans of its own."""


def has_too_many_scans(data: bytes) -> bool:
    """Whether the first picture of a JPEG has more than `MOST_SCANS`."""
    scans, found = 0, MARKER.search(data)
    while found is not None and data[found.end() - 1] != END and scans <= MOST_SCANS:
        marker, end = data[found.end() - 1], found.end()
        scans += marker == SCAN
        if marker in WITH_LENGTH:
            end += int.from_bytes(data[end : end + 2])
        found = MARKER.search(data, end)
    return scans > MOST_SCANS


FORMATS = ("PNG", "JPEG", "WEBP")
JPEGS = frozenset({"JPEG", "MPO"})
"""MPO: a JPEG that has further pictures behind the first one, such as a gain map or a second view. The first
one is read."""
GREY_OF_16_BITS = frozenset({"I", "I;16", "I;16L", "I;16B"})
DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.IGNORECASE)
MEDIA_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/webp"})
PIECE = 2**18
"""Characters of base64 that are decoded at a time, a multiple of 4. All other threads wait during each."""
COMPRESSION = 3
"""The level of the PNG's compression, from 0 to 9. Higher ones take much longer and save little."""
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, OverflowError, TypeError)
"""What Pillow raises for bytes that are no image, or one that is cut off."""

# The bound is `max_pixels`; Pillow's own would print a warning first.
Image.MAX_IMAGE_PIXELS = None


class ClientImage(NamedTuple):
    """An image as the client has sent it."""

    data: bytes
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> "ClientImage":
        return cls(data, sha256(data).digest())


class Png(NamedTuple):
    """A decoded image, and its bytes."""

    image: DecodedImage
    data: bytes


def image_of(url: str, where: str, max_bytes: int) -> ClientImage:
    """The image of a data URL. Raises InvalidRequest for another media type, bad base64 or too many bytes."""
    head = DATA_URL.match(url, 0, 200)
    if head is None or not head[3]:
        raise invalid(where, "a data URL begins with data:image/png;base64,")
    if (head[1] or "").lower() not in MEDIA_TYPES:
        raise invalid(
            where, f"the media type {(head[1] or 'text/plain')[:80]!r} is not served: PNG, JPEG or WebP"
        )
    if (len(url) - head.end()) * 3 // 4 > max_bytes + 2:
        raise too_large(where, max_bytes)
    try:
        data = b"".join(_pieces(url, head.end()))
    except (binascii.Error, ValueError) as error:
        raise invalid(where, "not base64") from error
    if len(data) > max_bytes:
        raise too_large(where, max_bytes)
    return ClientImage.of(data)


def _pieces(url: str, start: int) -> Iterator[bytes]:
    """What the base64 from this character on stands for. Raises ValueError if it is malformed."""
    for begin in range(start, len(url), PIECE):
        piece = url[begin : begin + PIECE]
        if piece.endswith("=") and begin + PIECE < len(url):
            raise ValueError("padding before the end")
        yield base64.b64decode(piece, validate=True)


def png_of(data: bytes, where: str, vision: Vision, max_pixels: int, max_tokens: int) -> Png:
    """The image as the engine gets it.

    Raises InvalidRequest for other formats, animations, more than `max_pixels`, a JPEG of too many scans, an
    image of more than `max_tokens`, and what cannot be decoded. All but the last one is known before anything
    is decoded.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > max_pixels:
                raise invalid(where, f"{width} by {height} pixels; an image has at most {max_pixels} in all")
            if opened.format != "MPO" and getattr(opened, "is_animated", False):
                raise invalid(where, "an animation; send one image")
            if opened.format in JPEGS and has_too_many_scans(data):
                raise invalid(where, f"a JPEG of more than {MOST_SCANS} scans")
            if vision.tokens(*_size(vision, width, height, where)) > max_tokens:
                raise invalid(
                    where,
                    "with this image, the prompt has more tokens than the context holds",
                    code="context_length_exceeded",
                )
            plain = _in_rgb(ImageOps.exif_transpose(opened), where)
    except UnidentifiedImageError as error:
        raise invalid(where, "no PNG, JPEG or WebP") from error
    except UNREADABLE as error:
        raise invalid(where, f"the image cannot be decoded: {str(error)[:200]}") from error
    size = _size(vision, *plain.size, where)
    if size != plain.size:
        plain = plain.resize(size, Image.Resampling.BICUBIC)
    plain.info.clear()  # profiles and resolutions would give equal pixels other hashes
    written = io.BytesIO()
    plain.save(written, "PNG", compress_level=COMPRESSION)
    png = written.getvalue()
    return Png(DecodedImage(sha256(png).hexdigest(), *size), png)


def _size(vision: Vision, width: int, height: int, where: str) -> tuple[int, int]:
    try:
        return vision.size(width, height)
    except InvalidRequest as error:
        raise invalid(where, error.message) from error


def _in_rgb(image: Image.Image, where: str) -> Image.Image:
    """The image with 8 bits for each colour and without transparency, on white."""
    if image.mode in GREY_OF_16_BITS:  # `convert` would make everything above 255 white
        if "transparency" in image.info:
            raise invalid(where, "16 bits of grey with a transparent one; send 8 bits")
        image = image.convert("I").point(lambda grey: grey * (1 / 257) + 0.5).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    above = image.convert("RGBA")
    white = Image.new("RGBA", above.size, "white")
    return Image.alpha_composite(white, above).convert("RGB")


def too_large(where: str, max_bytes: int) -> InvalidRequest:
    return invalid(where, f"an image has at most {max_bytes} bytes")


@dataclass(eq=False)
class Decode:
    """One decode, and how many calls wait for it."""

    made: asyncio.Future[Png]
    waiting: int = 0

    @property
    def failed(self) -> bool:
        """Whether it has ended without an image."""
        return self.made.cancelled() or self.made.exception() is not None


class SharedDecodes:
    """The decodes in progress, by the digest of the client's bytes."""

    def __init__(self) -> None:
        self._running: dict[bytes, Decode] = {}

    async def png(self, digest: bytes, begin: Callable[[], asyncio.Future[Png]]) -> Png:
        """The image that a decode in progress makes of these bytes, or one that `begin` starts.

        If another call's decode fails, this call starts its own, because its bounds may be wider. Raises what
        its own raises. A decode that no call waits for any longer is cancelled.
        """
        while True:
            decode = self._running.get(digest)
            if own := decode is None:
                decode = self._running[digest] = Decode(begin())
            await self._ended(digest, decode)
            if own or not decode.failed:
                return decode.made.result()

    async def _ended(self, digest: bytes, decode: Decode) -> None:
        decode.waiting += 1
        try:
            await asyncio.wait([decode.made])
        finally:
            decode.waiting -= 1
            unneeded = decode.made.done() or not decode.waiting
            if unneeded and self._running.get(digest) is decode:
                del self._running[digest]
                decode.made.cancel()
