"""Lets the page's cookie open the REST, in place of a key in a header.

cookie ─▶ sign-in in Redis ─▶ its API key, if that is still accepted ─▶ the caller, in the scope's state

A request that may change something needs the sign-in's CSRF token as well, in `x-weir-csrf`, and has to come
from a page of the same origin. The agents' side takes no cookie.
"""

import hmac
import re
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.callers.identity import Caller, Identities
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.request import headers_of
from gateway.errors import NotPermitted
from gateway.page.cookies import page_token
from gateway.page.page_sessions import PageSession, PageSessions
from gateway.rest.access import SIGNED_IN
from rollout_queue.http.browsers import check_site
from rollout_queue.http.keys import presented_key

CSRF_HEADER = "x-weir-csrf"
OPENED = re.compile(r"/(admin|page)/.*|/groups|/sessions(/[^/]+(/(?!v1(/|$)|inference(/|$)).*)?)?", re.DOTALL)
"""The paths that a cookie opens. What agents call is not among them."""
READS = frozenset({"GET", "HEAD"})


@dataclass(frozen=True)
class SignedIn:
    """The user of a browser that is signed in."""

    token: str
    session: PageSession
    caller: Caller


class PageDoor:
    """Finds out who is signed in."""

    def __init__(self, sessions: PageSessions, identities: Identities, hosts: frozenset[str]) -> None:
        """`hosts`: `host[:port]` of the public URL."""
        self.sessions = sessions
        self.identities = identities
        self.hosts = hosts

    async def signed_in(self, scope: Scope, *, used: bool = True) -> SignedIn | None:
        """Whose cookie the request has; None without a valid one. Raises StorageUnavailable.

        `used`: as in `PageSessions.find`.
        """
        if (token := page_token(scope)) is None or self.identities.keys.open:
            return None
        if (session := await self.sessions.find(token, used=used)) is None:
            return None
        if (caller := self.identities.with_digest(session.key_digest)) is None:
            await self.sessions.end(token, session)  # the key was revoked
            return None
        return SignedIn(token, session, caller)

    def check(self, scope: Scope, session: PageSession) -> None:
        """Raises OtherSite or NotPermitted if another site may have had the browser send the request."""
        headers, changes = headers_of(scope), scope["method"] not in READS
        check_site(headers, self.hosts, changes=changes)
        given = headers.get(CSRF_HEADER, "").encode()
        if changes and not hmac.compare_digest(given, session.csrf.encode()):
            raise NotPermitted(f"the header {CSRF_HEADER} is missing or wrong", code="csrf")


class PageAccess:
    """ASGI middleware that puts the user of the page into the scope's state, as the caller."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and OPENED.fullmatch(scope["path"]) and page_token(scope) is not None:
            page = scope["app"].state.page
            door: PageDoor | None = None if page is None else page.door
            if door is not None and presented_key(headers_of(scope)) is None:
                try:
                    if (found := await door.signed_in(scope)) is not None:
                        door.check(scope, found.session)
                        scope.setdefault("state", {})[SIGNED_IN] = found.caller
                except ANSWERABLE as error:
                    await api_error(error).response()(scope, receive, send)
                    return
        await self._app(scope, receive, send)
