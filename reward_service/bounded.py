"""Reads answers of other services up to a bound, so that none of them fills the memory."""

from typing import NamedTuple

import httpx


class BoundedAnswer(NamedTuple):
    """`retry_after_s` is the header `retry-after` in seconds, if it is a number."""

    status: int
    body: bytes
    retry_after_s: float | None


class AnswerTooLarge(Exception):
    """An answer is larger than it may be."""


async def read_bounded(client: httpx.AsyncClient, request: httpx.Request, most_bytes: int) -> BoundedAnswer:
    """Raises httpx.HTTPError, AnswerTooLarge."""
    response = await client.send(request, stream=True)
    try:
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > most_bytes:
                raise AnswerTooLarge(f"the answer is larger than {most_bytes} bytes")
        wished = response.headers.get("retry-after", "")
        return BoundedAnswer(response.status_code, bytes(body), float(wished) if wished.isdecimal() else None)
    finally:
        await response.aclose()
