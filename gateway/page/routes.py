"""The page's routes: the page itself, its files, signing in and out, and the live stream.

Everything else that the page shows comes from the REST: `/admin/…` and `/sessions…`.

The headers that tell browsers what the page may do: use its own files, and the REST of its gateway.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.callers.identity import PREFIX
from gateway.edge.request import HeldBody, headers_of, read_body
from gateway.errors import InvalidRequest, NotPermitted, ObjectNotFound, UnknownCaller
from gateway.operators.actions import now_action
from gateway.page.live import LiveFeed
from gateway.page.page_access import SignedIn, set_cookie
from gateway.page.page_parts import PageParts, page_files
from gateway.parts import parts_of
from gateway.rest.access import SIGNED_IN, caller_in
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.foreign_json import read_json
from rollout_queue.http.api_page import COMMON, HTML
from rollout_queue.http.callers import check_site

ASSET: Final = {
    **COMMON,
    "content-security-policy": "default-src 'none'",
    "vary": "accept-encoding",
}
FOR_EVER: Final = "public, max-age=31536000, immutable"
"""A file under the path of this version never changes."""
EACH_TIME: Final = "no-cache"
"""A file under the path of another version, while gateways of two builds run, is asked for each time."""
ANSWER: Final = {**COMMON, "cache-control": "no-store"}


logger = logging.getLogger(__name__)

router = APIRouter(include_in_schema=False)


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /page/session`."""

    api_key: str


def page_of(request: Request) -> PageParts:
    """Raises ObjectNotFound if the settings turn the page off."""
    found: PageParts | None = request.app.state.page
    if found is None:
        raise ObjectNotFound("gateway.page.enabled is false")
    return found


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """The page. It has no data, so it needs no key."""
    page_of(request)
    return Response(page_files().html, headers=HTML, media_type="text/html")


@router.api_route("/page/assets/{version}/{name:path}", methods=["GET", "HEAD"])
async def asset(version: str, name: str, request: Request) -> Response:
    """A file of the page."""
    page_of(request)
    if (file := page_files().files.get(name)) is None:
        raise ObjectNotFound("the page has no such file")
    cached = FOR_EVER if version == page_files().version else EACH_TIME
    own = {**ASSET, "etag": file.etag, "cache-control": cached}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=own)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.zipped, headers=own | {"content-encoding": "gzip"}, media_type=file.media_type)
    return Response(file.body, headers=own, media_type=file.media_type)


@router.get("/page/session")
async def read_session(request: Request) -> Response:
    """Who is signed in; a `role` of null: nobody."""
    return _session_shape(request, await page_of(request).door.signed_in(request.scope))


@router.post("/page/session")
async def sign_in(request: Request) -> Response:
    """Sign in with an API key, which the body has. The reply sets the cookie."""
    page, gateway = page_of(request), parts_of(request)
    given = headers_of(request.scope)
    check_site(given, page.door.hosts, changes=True)
    address = request.client.host if request.client else ""
    with HeldBody(page.bodies, address) as held:
        body = await read_body(given, request.receive, held)
    try:
        key = read_json(body, SignIn).api_key.strip()
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is no sign-in: {error}", param="api_key") from error
    if key.startswith(PREFIX):
        raise NotPermitted("a session key does not open the page: sign in with a client key or an admin key")
    key_digest = gateway.identities.accepted_digest(key)
    if key_digest is None or (caller := gateway.identities.with_digest(key_digest)) is None:
        raise UnknownCaller("the API key is not known")
    if (former := await page.door.signed_in(request.scope, used=False)) is not None:
        await page.door.sessions.end(former.token, former.session)
    token, session = await page.door.sessions.begin(key_digest)
    logger.info("page: key %s signed in from %s", caller.key, address)
    if caller.role == "admin":
        request_id = request.scope["state"].get("request_id", "")
        await gateway.actions.add(now_action(caller.key, "POST", "/page/session", 200, request_id, address))
    reply = _session_shape(request, SignedIn(token, session, caller))
    reply.headers["set-cookie"] = set_cookie(request.scope, token, gateway.settings.page.longest_s)
    return reply


@router.delete("/page/session")
async def sign_out(request: Request) -> Response:
    """Sign out. `PageAccess` has checked that the page asks for it."""
    door = page_of(request).door
    if (found := await door.signed_in(request.scope, used=False)) is not None:
        await door.sessions.end(found.token, found.session)
    reply = _session_shape(request, None)
    reply.headers["set-cookie"] = set_cookie(request.scope, "", 0)
    return reply


@router.get("/page/events")
async def events(request: Request) -> Response:
    """Server-sent events: `picture` (what `/admin/status` and `/admin/pipeline` answer), `trouble`, `end`."""
    page = page_of(request)
    if caller_in(request.scope).role != "admin":
        raise NotPermitted("this path needs an admin key")
    page.feed.admit()
    return LiveEvents(page.feed, _may_look(request, page))


class LiveEvents(StreamingResponse):
    """The events of a viewer who was admitted, and who has left when they end."""

    def __init__(self, feed: LiveFeed, may_look: Callable[[], Awaitable[bool]]) -> None:
        self._feed = feed
        more = {**ANSWER, "x-accel-buffering": "no"}
        super().__init__(feed.events(may_look), headers=more, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.leave()


def _may_look(request: Request, page: PageParts) -> Callable[[], Awaitable[bool]]:
    """Whether the viewer is still signed in, or the key of the request still accepted."""
    signed_in = SIGNED_IN in request.scope["state"]

    async def may_look() -> bool:
        if signed_in:
            try:
                return await page.door.signed_in(request.scope, used=False) is not None
            except StorageUnavailable:
                return True  # nothing can be read either, and the next event asks again
        try:
            caller_in(request.scope)
        except UnknownCaller:
            return False
        return True

    return may_look


def _session_shape(request: Request, found: SignedIn | None) -> Response:
    open_ = parts_of(request).keys.open
    nobody = {"role": "admin" if open_ else None, "key": "", "csrf": "", "ends_at": None}
    shape = (
        nobody
        if found is None
        else {
            "role": found.caller.role,
            "key": found.caller.key,
            "csrf": found.session.csrf,
            "ends_at": found.session.ends_at,
        }
    )
    more = {"needs_key": not open_, "model": parts_of(request).settings.model_name}
    return JSONResponse(shape | more | {"page": page_files().version}, headers=ANSWER)
