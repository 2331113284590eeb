"""Checks a caller's key before the body of the request is read."""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_queue.http.errors import ApiError
from rollout_queue.http.keys import Keyring

PREFIX = "/v1/"
"""What the paths begin with that need a key."""


class AdminsOnly:
    """ASGI middleware: 401 without a known key, 403 with a client's."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app, self._keyring = app, keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            try:
                self._keyring.require_admin(Request(scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
