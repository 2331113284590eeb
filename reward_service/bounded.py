"""Reads answers of other services up to a bound, so that none of them fills the memory."""

import httpx


class AnswerTooLarge(Exception):
    """An answer is larger than it may be."""


async def read_bounded(
    client: httpx.AsyncClient, request: httpx.Request, most_bytes: int
) -> tuple[int, bytes]:
    """The status and the body. Raises httpx.HTTPError, AnswerTooLarge."""
    response = await client.send(request, stream=True)
    try:
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > most_bytes:
                raise AnswerTooLarge(f"the answer is larger than {most_bytes} bytes")
        return response.status_code, bytes(body)
    finally:
        await response.aclose()
