"""Checks that a caller's key allows a REST route."""

from starlette.requests import Request

from gateway.errors import NotPermitted
from gateway.sessions.identity import Caller, names
from gateway.wiring import GatewayParts, parts_of


def agent_of(request: Request) -> tuple[GatewayParts, Caller]:
    """The gateway's parts and the caller on an agent's path. Raises UnknownCaller; NotPermitted for a session
    key on another session's path."""
    gateway = parts_of(request)
    caller = gateway.identities.caller(request.headers)
    named = request.path_params.get("session_id")
    if caller.session_id is not None and named is not None and not names(named, caller.session_id):
        raise NotPermitted("the session key belongs to another session than the path")
    return gateway, caller


def client_of(request: Request) -> tuple[GatewayParts, Caller]:
    """The gateway's parts and the caller. Raises NotPermitted for a session key, UnknownCaller."""
    gateway = parts_of(request)
    return gateway, gateway.identities.client(request.headers)


def admins_only(request: Request) -> GatewayParts:
    """The gateway's parts. Raises NotPermitted for a caller without an admin key, UnknownCaller."""
    gateway = parts_of(request)
    if gateway.identities.caller(request.headers).role != "admin":
        raise NotPermitted("this path needs an admin key")
    return gateway
