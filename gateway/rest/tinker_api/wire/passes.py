"""Reads a body that is protobuf, and maybe compressed."""

import asyncio

import zstandard
from starlette.requests import Request

from gateway.edge.request import HeldBody
from gateway.errors import InvalidRequest
from rollout_queue.http.errors import ApiError

PIECE_BYTES = 2**20


async def pass_body(request: Request) -> bytes:
    """The body of forward_backward. Raises ApiError 413 and 415, InvalidRequest for a broken compression, and
    LimitReached if the decompressed bytes do not fit beside those of all bodies."""
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise ApiError(415, f"content encoding {encoding!r}: send zstd, or no compression")
    held: HeldBody = request.state.held
    try:
        return await _decompressed(body, held)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body is not compressed with zstd: {error}") from error


async def _decompressed(body: bytes, held: HeldBody) -> bytes:
    pieces, size, most = [b""], 0, held.budget.max_bytes
    with zstandard.ZstdDecompressor().stream_reader(body) as reader:
        while piece := await asyncio.to_thread(reader.read, PIECE_BYTES):
            held.count(len(piece))
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise ApiError(413, f"the decompressed body is larger than {most} bytes")
    return b"".join(pieces)
