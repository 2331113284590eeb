"""Refuses bodies that are too large, before they fill the memory, and decodes those that are compressed."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_queue.http.content_codings import codings_of, content_encoding, decoded
from rollout_queue.http.errors import ApiError

CONTROL_BYTES = 2**20
"""The bound where bodies only give orders."""


class BodyLimit:
    """ASGI middleware: a body of more than `most_bytes`, decoded or not, is a 413. `of_paths` are other
    bounds, by path."""

    def __init__(
        self, app: ASGIApp, most_bytes: int = CONTROL_BYTES, of_paths: Mapping[str, int] | None = None
    ) -> None:
        self._app, self._most_bytes, self._of_paths = app, most_bytes, dict(of_paths or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await _body(scope, receive, self._of_paths.get(scope["path"], self._most_bytes))
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, replayed, send)


async def _body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """The whole body, decoded. Raises ApiError 400, 413 and 415."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > most_bytes:
        raise _too_large(most_bytes)
    codings = codings_of(content_encoding(scope))
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if len(body) > most_bytes:
            raise _too_large(most_bytes)
        if not message.get("more_body", False):
            break
    return await decoded(bytes(body), codings, most_bytes)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most_bytes} bytes")
