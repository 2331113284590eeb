"""Decodes bodies that clients compress with gzip, deflate or zstd, within a bound of the decoded bytes.

Content-Encoding: gzip, zstd ──▶ the body ▸ zstd's decoder ▸ gzip's decoder ──▶ what the client wrote
"""

import asyncio
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence

import zstandard
from starlette.types import Scope

from rollout_queue.http.errors import ApiError

HEADER = "content-encoding"
PIECE_BYTES = 2**20
"""What a decoder writes at once. Other calls run between two pieces."""
PART_BYTES = 2**16
"""What zlib reads at once: it copies what it leaves over."""
MOST_MEMBERS = 4096
"""The members that a body of gzip may have."""
MOST_CODINGS = 4
RAW_DEFLATE, DEFLATE, GZIP = -15, 15, 31
"""zlib's numbers of its formats."""
MOST_WINDOW_BYTES = 8 * 2**20
"""The distance that a frame of zstd may look back, if it is longer than a body may be (RFC 9659)."""
MOST_BLOCK_BYTES = 2**17
UNREADABLE = b"\xff" * (MOST_BLOCK_BYTES + 64)
"""Longer than what a cut frame of zstd may lack of its block, and then neither a block nor a frame."""
SKIPPED = b"\x50\x2a\x4d\x18" + len(UNREADABLE).to_bytes(4, "little") + UNREADABLE
"""A frame that decoders skip."""
LAST_BYTES = b"." * 16
LAST_FRAME = b"\x28\xb5\x2f\xfd\x20\x10\x83\x00\x00\x2e"
"""A frame with these bytes."""

Decoder = Callable[[bytes, int], Iterator[bytes]]
"""Called with a body and the most bytes that it may become; the result is lazy."""


def content_encoding(scope: Scope) -> str:
    """The header of a request, all of its lines."""
    name = HEADER.encode()
    return ", ".join([value.decode("latin-1") for each, value in scope["headers"] if each == name])


def codings_of(header: str) -> Sequence[str]:
    """The codings of a body, in the order in which they were applied. Raises ApiError 415."""
    codings = [each.strip().lower() for each in header.split(",")]
    codings = [each for each in codings if each not in ("", "identity")]
    if foreign := [each for each in codings if each not in DECODERS]:
        raise _not_served(f"content encoding {foreign[0][:100]!r}")
    if len(codings) > MOST_CODINGS:
        raise _not_served(f"more than {MOST_CODINGS} content encodings")
    return codings


async def decoded(
    body: bytes, codings: Sequence[str], most_bytes: int, count: Callable[[int], None] = lambda _: None
) -> bytes:
    """What a client wrote before it applied the codings. `count` is called with the size of each decoded
    piece, before the next one is made. Raises ApiError 400 and 413, and what `count` raises."""
    for coding in reversed(codings if body else ()):
        pieces, parts, size = DECODERS[coding](body, most_bytes), list[bytes](), 0
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                size += len(piece)
                if size > most_bytes:
                    raise ApiError(413, f"the decoded body is larger than {most_bytes} bytes")
                count(len(piece))
                parts.append(piece)
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            raise ApiError(400, f"the body is not encoded with {coding}: {error}") from error
        body = await asyncio.to_thread(b"".join, parts)
    return body


def _gzip(body: bytes, _: int) -> Iterator[bytes]:
    place = 0
    for _ in range(MOST_MEMBERS):
        place = yield from _inflated(body, place, GZIP)
        if place == len(body):
            return
    raise EOFError(f"it has more than {MOST_MEMBERS} members")


def _deflate(body: bytes, _: int) -> Iterator[bytes]:
    """The format of zlib; some clients send it without its header."""
    headed = body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0
    if (yield from _inflated(body, 0, DEFLATE if headed else RAW_DEFLATE)) < len(body):
        raise EOFError("it goes on behind its end")


def _inflated(body: bytes, place: int, form: int) -> Generator[bytes, None, int]:
    """Returns the place behind the end."""
    decoder = zlib.decompressobj(form)
    while not decoder.eof:
        part = body[place : place + PART_BYTES]
        piece = decoder.decompress(part, PIECE_BYTES)
        place += len(part) - len(decoder.unconsumed_tail) - len(decoder.unused_data)
        if piece:
            yield piece
        elif not part:
            raise EOFError("its end is missing")
    return place


def _zstd(body: bytes, most_bytes: int) -> Iterator[bytes]:
    """The reader does not tell whether the last frame is whole. So two more frames follow the body: only if
    it is whole, the first is skipped, and the bytes of the second come out."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=max(MOST_WINDOW_BYTES, most_bytes))
    last = b""
    with unpacker.stream_reader(body + SKIPPED + LAST_FRAME, read_across_frames=True) as reader:
        while piece := reader.read(PIECE_BYTES):
            whole = last + piece
            yield whole[: -len(LAST_BYTES)]
            last = whole[-len(LAST_BYTES) :]
    if last != LAST_BYTES:
        raise EOFError("its end is missing")


DECODERS: dict[str, Decoder] = {"gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate, "zstd": _zstd}
SERVED = "gzip, deflate, zstd"


def _not_served(what: str) -> ApiError:
    return ApiError(415, f"{what}: send {SERVED}, or no compression", headers={"accept-encoding": SERVED})
