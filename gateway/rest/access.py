"""Who may use which REST routes."""

from starlette.requests import Request

from gateway.errors import NotPermitted
from gateway.sessions.identity import Caller
from gateway.wiring import Collaborators, collaborators


def client_of(request: Request) -> tuple[Collaborators, Caller]:
    """The collaborators and the caller. Raises NotPermitted for a session key, UnknownCaller."""
    gateway = collaborators(request)
    return gateway, gateway.identities.client(request.headers)


def admins_only(request: Request) -> Collaborators:
    """The collaborators. Raises NotPermitted for a caller without an admin key, UnknownCaller."""
    gateway = collaborators(request)
    if gateway.identities.caller(request.headers).role != "admin":
        raise NotPermitted("this path needs an admin key")
    return gateway
