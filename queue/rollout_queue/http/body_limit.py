"""Refuses bodies that are too large, one or all together, before they fill the memory, and decodes those that
are compressed.

The bound counts decoded bytes, of gzip, deflate and zstd:

Content-Encoding: gzip, zstd ──▶ the body ▸ zstd's decoder ▸ gzip's decoder ──▶ what the client wrote
"""

import asyncio
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import zstandard
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


CONTROL_BYTES = 2**20
"""The bound where bodies only give orders."""
AT_ONCE = 16
"""How many of a service's largest bodies may be in memory at once; so many smaller ones as are as large."""
WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose bodies no route reads."""

Grow = Callable[[int], None]
"""Called with the bytes that one body has more. Raises ApiError 429."""


class BodyLimit:
    """ASGI middleware: a body of more than `most_bytes`, decoded or not, is a 413. `of_paths` are other
    bounds, by path. A body for which there is no room beside the others is a 429. Each counts until its
    request is answered."""

    def __init__(
        self, app: ASGIApp, most_bytes: int = CONTROL_BYTES, of_paths: Mapping[str, int] | None = None
    ) -> None:
        self._app, self._most_bytes, self._of_paths = app, most_bytes, dict(of_paths or {})
        self._in_all = AT_ONCE * max(most_bytes, *self._of_paths.values(), 0)
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        with self._counted() as grow:
            try:
                body = await _body(scope, receive, self._of_paths.get(scope["path"], self._most_bytes), grow)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            await self._app(scope, replayed(body, receive), send)

    @contextmanager
    def _counted(self) -> Iterator[Grow]:
        """Counts the bytes of one body, as long as the block runs."""
        size = 0

        def grow(more: int) -> None:
            nonlocal size
            if self._held + more > self._in_all:
                message = f"the bodies of requests in work have {self._held} bytes, of {self._in_all} allowed"
                raise ApiError(429, f"{message}; try again", code="bodies_limit")
            self._held += more
            size += more

        try:
            yield grow
        finally:
            self._held -= size


def replayed(body: bytes, receive: Receive) -> Receive:
    """The route's `receive`: the body as one message, then the client's further messages."""
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return given.pop() if given else await receive()

    return receive_again


async def _body(scope: Scope, receive: Receive, most_bytes: int, grow: Grow) -> bytes:
    """The whole body, decoded. Raises ApiError 400, 413, 415 and 429."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > most_bytes:
        raise _too_large(most_bytes)
    codings = codings_of(content_encoding(scope))
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        piece = message.get("body", b"")
        if len(body) + len(piece) > most_bytes:
            raise _too_large(most_bytes)
        grow(len(piece))
        body += piece
        if not message.get("more_body", False):
            break
    return await decoded(bytes(body), codings, most_bytes, grow)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most_bytes} bytes")
