"""Answers clients of HTTP/1.0, which read no chunks."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for such a client: an answer without a length ends with the connection.

    uvicorn writes chunks if the answer has no length. So it is told, before each part, that the part is all
    that is left.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return served
