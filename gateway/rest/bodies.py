"""The base class of REST request bodies, which refuses unknown fields and converts no types.

Checks a caller's key, and then the request's body, before a REST route receives them.

The body must be JSON, except on a few paths, and within the limits.
"""

import re
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, model_validator
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.dialects.fields import check_metadata
from gateway.edge.errors import api_error
from gateway.edge.request import JSON, BodyBudget, ClientDisconnected, HeldBody, headers_of, read_body
from gateway.errors import GatewayError
from gateway.rest.access import admission_in, caller_in, operator_in
from rollout_queue.foreign_json import check_values
from rollout_queue.http.body_limit import WITHOUT_BODY, replayed
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import JsonRoute

MOST_FIELDS = 100
"""No object of a body has so many fields."""


class PromptRoute(JsonRoute):
    """A route whose body has token ids, and not much besides."""

    most_values = 2**20

    def check(self, body: bytes) -> None:
        super().check(body)
        check_values(body, JsonRoute.most_values, {b":": 1.0, b"[": 1.0, b"{": 1.0, b'"': 0.5})


class RestBody(BaseModel):
    """A request body, checked strictly."""

    # With a bound on strings, pydantic refuses a lone surrogate (half a UTF-16 pair), which cannot be stored.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MOST_FIELDS:  # each unknown one would be its own error
            raise ValueError(f"it has more than {MOST_FIELDS} fields")
        return given


def _storable(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError) as error:  # 2**64, half a surrogate pair, deep nesting
        raise ValueError("it contains a value that cannot be stored") from error
    check_metadata(value, info.field_name or "metadata")
    return value


StoredMetadata = Annotated[dict[str, Any], AfterValidator(_storable)]
"""What a client notes of what it makes, within `MAX_METADATA_BYTES`."""


PROTOBUF = "application/x-protobuf"
OWN_BODIES = frozenset({"/page/session"})
"""Paths whose routes read their bodies themselves: whoever signs in has no key in a header."""
UNCOUNTED = re.compile(
    r"/api/v1/(asample|retrieve_future|cancel_future|telemetry|session_heartbeat|client/\w+|weights_info|get_info"
    r"|sessions/search)|/sessions/[^/]+/heartbeat|(/sessions/[^/]+)?/v1/.*"
)
"""Requests with a body that store nothing, or that count as calls. All others of a client key are writes."""
MEDIA_TYPES = {"/api/v1/forward_backward": PROTOBUF}
"""The paths whose bodies are not JSON."""


class JsonBodies:
    """ASGI middleware that reads the whole body: 401 without a key, 429 for too many writes, 413 if it is too
    large, 415 if it is not JSON, or what the path takes instead."""

    def __init__(self, app: ASGIApp, bodies: BodyBudget) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        if scope["path"] in OWN_BODIES:
            with suppress(ClientDisconnected):
                await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        try:
            caller = operator_in(scope) if scope["path"].startswith("/admin/") else caller_in(scope)
            if caller.owner and not UNCOUNTED.fullmatch(scope["path"]):
                admission_in(scope).check_write(caller.owner)
        except GatewayError as error:
            await api_error(error).response()(scope, receive, send)
            return
        with HeldBody(self._bodies, caller.payer) as held:
            try:
                body = await read_body(headers, receive, held, MEDIA_TYPES.get(scope["path"], JSON))
            except (ApiError, GatewayError) as error:
                await api_error(error).response()(scope, receive, send)
            except ClientDisconnected:
                pass
            else:
                scope.setdefault("state", {}).update(caller=caller, held=held)
                await self._app(scope, replayed(body, receive), send)
