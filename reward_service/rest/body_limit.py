"""Refuses bodies that are too large, before they fill the memory."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_queue.http.errors import ApiError


class BodyLimit:
    """ASGI middleware: a body of more than `most_bytes` is a 413."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app, self._most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._most_bytes:
            await self._refusal().response()(scope, receive, send)
            return
        body = await self._body(receive)
        if body is None:
            await self._refusal().response()(scope, receive, send)
            return
        given: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, replayed, send)

    async def _body(self, receive: Receive) -> bytearray | None:
        """The whole body; None if it is too large."""
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if len(body) > self._most_bytes:
                return None
            if not message.get("more_body", False):
                break
        return body

    def _refusal(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._most_bytes} bytes")
