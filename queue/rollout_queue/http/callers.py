"""Refuses requests that a service must not serve, before a byte of their bodies is read.

without keys   what another web site has a browser send: 403
with keys      what comes without a known key, except to a few paths: 401; with a key of no use here: 403
"""

from collections.abc import Set

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_queue.http.browsers import PROBES, check_keyless, public_hosts
from rollout_queue.http.errors import ApiError
from rollout_queue.http.keys import Keyring, Role

OPEN = PROBES | {"/metrics", "/openapi.json", "/docs", "/docs/style.css"}
"""Paths that are read without a key: they tell nothing of what the service works on."""
READS = frozenset({"GET", "HEAD"})
ROLE = "role"
"""Where the scope's state has the caller's role, except on open paths of a service with keys."""


class CallerCheck:
    """ASGI middleware in front of every route of a service. Routes ask `role_in` who calls."""

    def __init__(
        self, app: ASGIApp, keyring: Keyring, callers: Set[Role], public_url: str | None = None
    ) -> None:
        """`callers`: the roles for which there is any route."""
        self._app, self._keyring, self._callers = app, keyring, callers
        self._hosts = public_hosts(public_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError 401 and 403."""
        if self._keyring.open:
            check_keyless(scope, self._hosts)
        elif scope["path"] in OPEN and scope["method"] in READS:
            return
        role = self._keyring.caller(Headers(scope=scope))
        if role not in self._callers:
            raise _needs_admin()
        scope.setdefault("state", {})[ROLE] = role


def role_in(request: Request) -> Role:
    """The role of the caller whom `CallerCheck` let in."""
    role: Role = request.scope["state"][ROLE]
    return role


async def admins_only(request: Request) -> None:
    """Raises ApiError 403 for callers with another key than an operator's."""
    if role_in(request) != "admin":
        raise _needs_admin()


def _needs_admin() -> ApiError:
    return ApiError(403, "this path needs an admin key")
