"""Checks that a caller's key, or the session of the page that a cookie names, allows a REST route."""

from starlette.requests import Request
from starlette.types import Scope

from gateway.edge.request import headers_of
from gateway.errors import NotPermitted
from gateway.sessions.identity import Caller, Identities, names, no_session_key
from gateway.wiring.parts import GatewayParts, parts_of

SIGNED_IN = "signed_in"
"""Where the scope's state has the caller that the page's cookie names; only on paths that a cookie opens."""


def caller_in(scope: Scope) -> Caller:
    """Who sent the request: by the page's cookie, else by its key. Raises UnknownCaller."""
    signed_in: Caller | None = scope.get("state", {}).get(SIGNED_IN)
    if signed_in is not None:
        return signed_in
    identities: Identities = scope["app"].state.parts.identities
    return identities.caller(headers_of(scope))


def agent_of(request: Request) -> tuple[GatewayParts, Caller]:
    """The gateway's parts and the caller on an agent's path. Raises UnknownCaller; NotPermitted for a session
    key on another session's path."""
    caller = caller_in(request.scope)
    named = request.path_params.get("session_id")
    if caller.session_id is not None and named is not None and not names(named, caller.session_id):
        raise NotPermitted("the session key belongs to another session than the path")
    return parts_of(request), caller


def client_of(request: Request) -> tuple[GatewayParts, Caller]:
    """The gateway's parts and the caller. Raises NotPermitted for a session key, UnknownCaller."""
    return parts_of(request), no_session_key(caller_in(request.scope))


def admins_only(request: Request) -> GatewayParts:
    """The gateway's parts. Raises NotPermitted for a caller without an admin key, UnknownCaller."""
    if caller_in(request.scope).role != "admin":
        raise NotPermitted("this path needs an admin key")
    return parts_of(request)
