"""Refuses bodies that are too large, before they fill the memory."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_queue.http.errors import ApiError


class BodyLimit:
    """ASGI middleware: a body of more than `most_bytes` is a 413. `of_paths` are other bounds, by path."""

    def __init__(self, app: ASGIApp, most_bytes: int, of_paths: Mapping[str, int] | None = None) -> None:
        self._app, self._most_bytes, self._of_paths = app, most_bytes, dict(of_paths or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most_bytes = self._of_paths.get(scope["path"], self._most_bytes)
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > most_bytes:
            await _refusal(most_bytes).response()(scope, receive, send)
            return
        body = await _body(receive, most_bytes)
        if body is None:
            await _refusal(most_bytes).response()(scope, receive, send)
            return
        given: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, replayed, send)


async def _body(receive: Receive, most_bytes: int) -> bytearray | None:
    """The whole body; None if it is too large."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if len(body) > most_bytes:
            return None
        if not message.get("more_body", False):
            break
    return body


def _refusal(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most_bytes} bytes")
