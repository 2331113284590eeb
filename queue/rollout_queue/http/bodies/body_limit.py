"""Refuses bodies that are too large, one or all together, before they fill the memory, and decodes those that
are compressed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_queue.http.bodies.content_codings import codings_of, content_encoding, decoded
from rollout_queue.http.errors import ApiError

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
            await self._app(scope, _replayed(body, receive), send)

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


def _replayed(body: bytes, receive: Receive) -> Receive:
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
