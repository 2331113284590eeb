"""Lets the page's cookie open the REST, in place of a key in a header.

cookie ─▶ sign-in in Redis ─▶ its API key, if that is still accepted ─▶ the caller, in the scope's state

A request that may change something needs the sign-in's CSRF token as well, in `x-weir-csrf`, and has to come
from a page of the same origin. The agents' side takes no cookie.

The page's cookie. Scripts cannot read it, and no other site can have a browser send it.

https    `__Host-weir_page`, with `Secure`: no other host, and no page over http, can set it
http     `weir_page`: the page on loopback, or behind a proxy that does not say that it speaks https

Who is signed in on the page. A browser holds a random token in a cookie; Redis has the token's digest.

weir:page_session:{digest of the token}      the sign-in, JSON; expires when it was idle, or is too old
weir:page_sessions:{digest of the secret}    the tokens' digests of one secret, by when they end at the latest

A sign-in names an API key by the digest of its secret. So it ends at once when the key is revoked.
"""

import hmac
import re
import secrets
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.callers.identity import Caller, Identities
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.request import headers_of
from gateway.errors import NotPermitted
from gateway.rest.access import SIGNED_IN
from gateway.settings import PageSettings
from rollout_queue import clock
from rollout_queue.http.callers import check_site, digest, presented_key
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored

NAME, SECURE_NAME = "weir_page", "__Host-weir_page"
TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


def page_token(scope: Scope) -> str | None:
    """The token of the request's cookie.

    None without one, and with several different ones: a page on another port, or in a lower path, has set a
    cookie of its own, and which one is the user's cannot be told.
    """
    name = SECURE_NAME if _is_secure(scope) else NAME
    found = {value for key, value in _cookies(scope) if key == name}
    token = found.pop() if len(found) == 1 else ""
    return token if TOKEN.fullmatch(token) else None


def set_cookie(scope: Scope, token: str, longest_s: float) -> str:
    """The value of `Set-Cookie`; an empty token removes the cookie."""
    secure = _is_secure(scope)
    age = int(longest_s) if token else 0
    parts = [f"{SECURE_NAME if secure else NAME}={token}", "Path=/", f"Max-Age={age}", "HttpOnly"]
    return "; ".join([*parts, "SameSite=Strict", *(["Secure"] if secure else [])])


def _is_secure(scope: Scope) -> bool:
    """Whether the browser used https. A proxy says so by `x-forwarded-proto`, which no other site can have a
    browser send."""
    scheme = dict(scope["headers"]).get(b"x-forwarded-proto", b"").decode("latin-1").strip().lower()
    return bool((scheme if scheme in ("http", "https") else scope["scheme"]) == "https")


def _cookies(scope: Scope) -> list[tuple[str, str]]:
    found = []
    for name, value in scope["headers"]:
        if name == b"cookie":
            for part in value.decode("latin-1").split(";"):
                key, equals, text = part.strip().partition("=")
                if equals:
                    found.append((key, text))
    return found


class PageSession(msgspec.Struct, frozen=True):
    """A sign-in."""

    key_digest: str
    """The digest of the secret with which the user signed in."""
    csrf: str
    """What requests that may change something have in `x-weir-csrf`."""
    ends_at: float
    """Seconds since the epoch; from then on the user has to sign in again."""


class PageSessions:
    """The sign-ins of all gateways. Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis, settings: PageSettings) -> None:
        self._redis = redis
        self._settings = settings

    async def begin(self, key_digest: str) -> tuple[str, PageSession]:
        """Sign in. Returns the token for the cookie, which is stored nowhere, and the sign-in.

        Beyond `sessions_per_key`, those that end first are signed out.
        """
        token, now = secrets.token_urlsafe(32), clock.now()
        session = PageSession(key_digest, secrets.token_urlsafe(32), now + self._settings.longest_s)
        of_key = key_names.page_sessions_of(key_digest)
        async with self._redis.pipeline(transaction=True) as beginning:
            name = key_names.page_session(digest(token))
            beginning.set(name, msgspec.json.encode(session), ex=self._idle_s(session, now))
            beginning.zadd(of_key, {digest(token): session.ends_at})
            beginning.zremrangebyscore(of_key, 0, now)
            # bounded: what one more sign-in is too many
            beginning.zrange(of_key, 0, -self._settings.sessions_per_key - 1)
            beginning.zremrangebyrank(of_key, 0, -self._settings.sessions_per_key - 1)
            beginning.expire(of_key, int(self._settings.longest_s) + 1)
            *_, oldest, _, _ = await stored(beginning.execute())
        if oldest:
            # bounded: so, too
            await stored(self._redis.delete(*(key_names.page_session(each.decode()) for each in oldest)))
        return token, session

    async def find(self, token: str, *, used: bool = True) -> PageSession | None:
        """The sign-in of this token; None if it has ended. If `used`, its idle time begins anew."""
        name, now = key_names.page_session(digest(token)), clock.now()
        packed = await stored(self._redis.get(name))
        if packed is None:
            return None
        session = msgspec.json.decode(packed, type=PageSession)
        if session.ends_at <= now:
            return None
        if used:
            await stored(self._redis.expire(name, self._idle_s(session, now)))
        return session

    async def end(self, token: str, session: PageSession) -> None:
        """Sign out."""
        await stored(self._redis.delete(key_names.page_session(digest(token))))
        await stored(self._redis.zrem(key_names.page_sessions_of(session.key_digest), digest(token)))

    def _idle_s(self, session: PageSession, now: float) -> int:
        return max(1, int(min(self._settings.idle_s, session.ends_at - now)))


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
