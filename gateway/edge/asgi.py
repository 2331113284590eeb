"""The outermost ASGI application: it passes agents' calls to endpoints, and other requests to FastAPI.

[/sessions/{id}]/v1/{chat/completions | completions | responses | messages | …} ──▶ the path's endpoint
every other path ──▶ FastAPI's application with the REST routes

It is bare ASGI, because FastAPI would cost time for every streamed token.

It also slows down whoever tries keys: a wrong key beyond the limits gets a late 429 in place of a 401. A
valid key is never refused because somebody else guesses, also behind a proxy, where all callers have one
address. A guess costs time on a connection, and connections are bounded (`gateway.connections`). Each process
counts for itself.
"""

import ipaddress
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.callers.identity import Identities
from gateway.counters import CLIENT_LEFT, CallFigures
from gateway.edge.background_answers import BackgroundAnswers
from gateway.edge.calls import InFlightCalls
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.reply import Reply
from gateway.edge.request import (
    AgentRequest,
    BodyBudget,
    ClientDisconnected,
    DisconnectWatch,
    HeldBody,
    headers_of,
    read_body,
)
from gateway.errors import NotPermitted, UnknownCaller
from gateway.settings import WrongKeySettings
from rollout_queue import clock
from rollout_queue.http.bounded_protocol import FLOW
from rollout_queue.http.callers import check_keyless, presented_key
from rollout_queue.http.errors import ApiError, request_id_of
from rollout_queue.http.json_routes import PacedReceive, next_iteration
from rollout_queue.service_log import begin_log_ids, log_ids
from rollout_queue.tracing import TraceSpan, describe_request, request_span

ADDRESSES = 10_000
"""How many addresses are remembered: those that tried last."""
WINDOW_S = 60.0
NETWORK_BITS = 64
"""One subscriber has at least so much of IPv6, so its addresses count as one."""


class WrongKeys:
    """Counts the wrong keys of each address, and of all."""

    def __init__(self, settings: WrongKeySettings) -> None:
        self._settings = settings
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """By address, when its whole allowance is there again; the one that tried last is last."""
        self._all_full_at = 0.0

    @property
    def remembered(self) -> int:
        """How many addresses are remembered."""
        return len(self._full_at)

    async def refusal(self, address: str) -> ApiError | None:
        """Count a wrong key. Returns the error that it gets in place of a 401, after a delay, or None."""
        settings, now, name = self._settings, clock.monotonic(), _counted_as(address)
        own_at = _spent(self._full_at.get(name, now), now, settings.per_address)
        all_at = _spent(self._all_full_at, now, settings.in_all)
        if own_at - now <= WINDOW_S and all_at - now <= WINDOW_S:
            self._all_full_at = all_at
            self._remember(name, own_at)
            return None
        wait_s = max(own_at, all_at) - now - WINDOW_S
        await clock.sleep(settings.delay_s)  # the guesser waits; other connections do not
        message = "too many wrong keys came from your address, or in all; a valid key is accepted"
        # SDKs do not send such a request again.
        headers = {"retry-after": str(math.ceil(wait_s)), "x-should-retry": "false"}
        return ApiError(429, message, code="wrong_keys", headers=headers)

    def _remember(self, name: str, full_at: float) -> None:
        self._full_at[name] = full_at
        self._full_at.move_to_end(name)
        if len(self._full_at) > ADDRESSES:
            self._full_at.popitem(last=False)


def _spent(full_at: float, now: float, per_window: int) -> float:
    """When a bucket of `per_window` tokens that was full at `full_at` is full again, with one token less."""
    return max(full_at, now) + WINDOW_S / per_window


def _counted_as(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a socket file, or a test
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((int(found), NETWORK_BITS), strict=False))
    return address


logger = logging.getLogger(__name__)

SIGN_IN = "/page/session"
"""The path whose requests have a key in their body."""


class Endpoint(Protocol):
    """Serves one of the agents' paths, and writes errors in that path's wire shape."""

    @property
    def figures(self) -> CallFigures:
        """The metrics of the path's calls."""
        ...

    async def serve(self, request: AgentRequest, reply: Reply) -> None:
        """Write the reply to the request. To answer with an error, raise one of `ANSWERABLE`."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The body of an error."""
        ...


class EdgeApp:
    """The ASGI application that uvicorn runs; `app` is FastAPI's."""

    def __init__(
        self,
        app: ASGIApp,
        bodies: BodyBudget,
        calls: InFlightCalls,
        answers: BackgroundAnswers,
        leave_s: float,
        rest: CallFigures,
        wrong_keys: WrongKeys,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        """`rest`: the metrics of the requests that `app` serves. `hosts`: `host[:port]` of the public URL."""
        self._app = app
        self._wrong_keys = wrong_keys
        self._hosts = hosts
        self._rest = rest
        self._bodies = bodies
        self._calls = calls
        self._answers = answers
        self._leave_s = leave_s
        self.leaving = False
        self.endpoints: Mapping[str, Endpoint] = {}
        """By path, without `/sessions/{id}`; set when the application starts."""
        self.identities: Identities
        """Set when the application starts."""
        self.end_streams: Callable[[], None] = lambda: None
        """Ends the streams that would not end by themselves; called once no new request comes."""

    async def leave(self) -> None:
        """After SIGTERM: let `/ready` fail, and take calls for `leave_s`, so that load balancers notice."""
        self.leaving = True
        await clock.sleep(self._leave_s)  # load balancers do not say when they have noticed
        self.end_streams()

    def end_calls(self) -> None:
        """End the calls in flight, and the answers in the background. Each client gets an error."""
        self._answers.end_all()
        self._calls.end_all(ApiError(503, "the gateway stopped before the answer was complete"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self.identities.keys.open and (refusal := self._foreign(scope)) is not None:
                await refusal.response()(scope, receive, send)
                return
            session_id, path = _split(scope["path"])
            receive = PacedReceive(receive, partial(self._payer, scope))
            known = partial(self._known, scope)
            if (endpoint := self.endpoints.get(path)) is not None:
                prefix = "" if session_id is None else "/sessions/{session_id}"
                scope.setdefault("state", {})["path_template"] = prefix + path
                with request_span(scope, prefix + path, known) as traced:
                    await self._serve(endpoint, session_id, scope, receive, send, traced)
            else:
                scope.setdefault("state", {})["session_id"] = session_id
                with request_span(scope, None, known) as traced:
                    await self._serve_rest(scope, receive, send, traced)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        """Whether the request has a key that this gateway knows, be it a service's, or needs none."""
        try:
            self.identities.caller(headers_of(scope))
        except NotPermitted:
            return True
        except UnknownCaller:
            return False
        return True

    def _payer(self, scope: Scope) -> Hashable:
        """Who sends the body of a request; None for a stranger."""
        try:
            return self.identities.caller(headers_of(scope)).payer
        except (NotPermitted, UnknownCaller):
            return None

    def _foreign(self, scope: Scope) -> ApiError | None:
        """Why a gateway without keys does not answer: another web site sent the request."""
        page = scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        try:
            check_keyless(scope, self._hosts, linked=page)
        except ApiError as error:
            return error
        return None

    async def _serve_rest(self, scope: Scope, receive: Receive, send: Send, traced: TraceSpan) -> None:
        refused, status = False, CLIENT_LEFT

        async def counted(message: Message) -> None:
            nonlocal refused, status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 401 and (error := await self._too_many(scope)) is not None:
                    refused = True
                    status = error.status
                    self._rest.statuses[status] += 1
                    named = {k: v for k, v in message["headers"] if k == b"x-request-id"}
                    await send_error(error, named, scope, receive, send)
                    return
                self._rest.statuses[status] += 1
            if not refused:
                await send(message)

        self._rest.in_flight += 1
        try:
            await next_iteration(self._payer(scope))  # FastAPI takes a millisecond
            await self._app(scope, receive, counted)
        finally:
            self._rest.in_flight -= 1
            describe_request(traced, scope, status, log_ids())

    async def _too_many(self, scope: Scope) -> ApiError | None:
        """The error that a 401 for a wrong key becomes if too many were wrong. It comes late."""
        if scope["path"] != SIGN_IN and presented_key(headers_of(scope)) is None:
            return None
        return await self._wrong_keys.refusal((scope.get("client") or ("",))[0])

    async def _serve(
        self,
        endpoint: Endpoint,
        session_id: str | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        traced: TraceSpan,
    ) -> None:
        headers = headers_of(scope)
        request_id = request_id_of(headers.get("x-request-id", ""))
        ids = begin_log_ids(request_id, session_id)
        figures = endpoint.figures
        flow = scope.setdefault("state", {}).get(FLOW)
        reply = Reply(send, request_id, figures, last=self.leaving, flow=flow)
        figures.in_flight += 1
        try:
            caller = self.identities.caller(headers)  # before the body: it is not read without a valid key
            if scope["method"] != "POST":
                raise wrong_method(scope["method"], headers)
            with HeldBody(self._bodies, caller.payer) as held:
                body = await read_body(headers, receive, held)
                with DisconnectWatch(receive) as client:
                    request = AgentRequest(caller, headers, body, client, held, session_id)
                    await endpoint.serve(request, reply)
        except ClientDisconnected:
            pass
        except UnknownCaller as error:
            await _refuse(endpoint, reply, await self._too_many(scope) or api_error(error))
        except ANSWERABLE as error:
            await _refuse(endpoint, reply, api_error(error))
        except Exception:  # outermost frame: a bug, for which the client gets a 500
            logger.exception("request %s failed", request_id)
            bug = ApiError(500, "internal error; the log has it under the request id")
            await _refuse(endpoint, reply, bug)
        finally:
            reply.stop_heartbeat()
            figures.in_flight -= 1
            if not reply.begun:
                figures.statuses[CLIENT_LEFT] += 1
            describe_request(traced, scope, reply.status, ids)


async def send_error(
    error: ApiError, more: Mapping[bytes, bytes], scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer with an error, and with more headers."""
    response = error.response()
    response.raw_headers.extend(more.items())
    await response(scope, receive, send)


def wrong_method(method: str, headers: Mapping[str, str]) -> ApiError:
    """The refusal of a request that is no POST.

    Codex asks for a WebSocket first. After a 426 it uses POST at once, after any other error only after six
    tries.
    """
    allowed = {"allow": "POST"}
    if headers.get("upgrade", "").lower() == "websocket":
        return ApiError(
            426, "this path takes POST and no WebSocket", headers=allowed | {"upgrade": "HTTP/1.1"}
        )
    return ApiError(405, f"{method}: this path takes POST", headers=allowed)


async def _refuse(endpoint: Endpoint, reply: Reply, error: ApiError) -> None:
    if not reply.begun:
        await reply.send_json(error.status, endpoint.error(error), error.headers)


def _split(path: str) -> tuple[str | None, str]:
    """The session id in a path, and the path without `/sessions/{id}`."""
    if path.startswith("/sessions/"):
        session_id, slash, rest = path[10:].partition("/")
        return (session_id, slash + rest) if session_id else (None, path)
    return None, path
