"""Reads a body that is protobuf, and maybe compressed."""

import asyncio

import zstandard
from starlette.requests import Request

from gateway.errors import InvalidRequest
from rollout_queue.http.errors import ApiError


async def pass_body(request: Request) -> bytes:
    """The body of forward_backward. Raises ApiError 413 and 415, InvalidRequest for a broken compression."""
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise ApiError(415, f"content encoding {encoding!r}: send zstd, or no compression")
    most: int = request.app.state.parts.settings.max_body_bytes
    return await asyncio.to_thread(_decompressed, body, most)


def _decompressed(body: bytes, most: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            data = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body is not compressed with zstd: {error}") from error
    if len(data) > most:
        raise ApiError(413, f"the decompressed body is larger than {most} bytes")
    return data
