"""Checks that a caller's key, or the session of the page that a cookie names, allows a REST route."""

import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import Scope

from gateway.callers.admission import Admission
from gateway.callers.identity import Caller, Identities, names, no_session_key
from gateway.edge.request import headers_of
from gateway.errors import NotPermitted
from gateway.parts import GatewayParts, parts_of
from rollout_queue.http.callers import ServiceRole

SIGNED_IN = "signed_in"
"""Where the scope's state has the caller that the page's cookie names; only on paths that a cookie opens."""


PERMITTED: Mapping[ServiceRole, re.Pattern[str]] = {
    "rollout_server": re.compile("POST /admin/rollout_servers"),
    "trainer": re.compile(
        r"(GET|POST) /admin/policies|GET /admin/policies/serving|(GET|DELETE) /admin/policies/\d+"
        r"|POST /admin/policies/rollback|POST /admin/adapters|DELETE /admin/adapters/[^/]+/\d+"
    ),
}
"""The requests that the key of a service permits: method and path. It permits no others."""


def caller_in(scope: Scope) -> Caller:
    """Who sent the request: by the page's cookie, else by its key. Raises UnknownCaller; NotPermitted for the
    key of a service."""
    signed_in: Caller | None = scope.get("state", {}).get(SIGNED_IN)
    if signed_in is not None:
        return signed_in
    identities: Identities = scope["app"].state.parts.identities
    return identities.caller(headers_of(scope))


def admission_in(scope: Scope) -> Admission:
    """The limits of the gateway that got a request."""
    parts: GatewayParts = scope["app"].state.parts
    return parts.admission


def operator_in(scope: Scope) -> Caller:
    """The operator, or the service, that sent a request to a path of operators. Raises UnknownCaller and
    NotPermitted."""
    identities: Identities = scope["app"].state.parts.identities
    service = identities.service(headers_of(scope))
    if service is not None and PERMITTED[service].fullmatch(f"{scope['method']} {scope['path']}"):
        return Caller(service, "", key=service)
    caller = caller_in(scope)
    if caller.role != "admin":
        raise NotPermitted("this path needs an admin key")
    return caller


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
    """The gateway's parts. Raises UnknownCaller, and NotPermitted for whoever is no operator, and no service
    that needs this request."""
    operator_in(request.scope)
    return parts_of(request)
