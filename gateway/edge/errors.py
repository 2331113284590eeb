"""The HTTP status of each of the gateway's errors, for the agents' paths and the REST routes.

GatewayError ──api_error──▶ ApiError (status, headers, body) ──▶ the dialect's wire shape, or REST's
"""

from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import Response

from gateway.errors import (
    EngineFault,
    GatewayError,
    InvalidRequest,
    KillsEngines,
    LimitReached,
    NoServer,
    NotPermitted,
    ObjectNotFound,
    StateConflict,
    UnknownCaller,
)
from rollout_queue.contract.errors import Deleted, StorageUnavailable
from rollout_queue.http.errors import ApiError, gone, storage_unavailable

STATUS: Final[dict[type[GatewayError], int]] = {
    InvalidRequest: 400,
    UnknownCaller: 401,
    NotPermitted: 403,
    ObjectNotFound: 404,
    StateConflict: 409,
    LimitReached: 429,
    NoServer: 503,
    EngineFault: 503,
}
"""By class; a subclass that is not listed has the status of its base class."""
STALLED_STATUS = 504
"""The status of an EngineFault whose reason is `stalled`: a gateway timeout."""

AnswerableError = ApiError | GatewayError | StorageUnavailable | Deleted
ANSWERABLE = (ApiError, GatewayError, StorageUnavailable, Deleted)
"""The errors that become error replies. Any other exception is a bug."""


def api_error(error: AnswerableError) -> ApiError:
    """The status, headers and body that a client receives for the error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StorageUnavailable):
        return storage_unavailable(error)
    if isinstance(error, Deleted):
        return gone(error)
    return ApiError(
        _status(error), error.message, param=error.param, code=error.code, headers=_retry_headers(error)
    )


def install_gateway_errors(app: FastAPI) -> None:
    """Make FastAPI answer a GatewayError that a REST route raises."""

    async def on_gateway_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)  # noqa: S101 - registered for this class alone
        return api_error(error).response()

    app.add_exception_handler(GatewayError, on_gateway_error)


def _retry_headers(error: GatewayError) -> dict[str, str]:
    """OpenAI's and Anthropic's SDKs obey both headers."""
    if isinstance(error, KillsEngines) or (isinstance(error, LimitReached) and error.retry_s is None):
        return {"x-should-retry": "false"}
    return {"retry-after": str(error.retry_s)} if isinstance(error, LimitReached) else {}


def _status(error: GatewayError) -> int:
    if isinstance(error, EngineFault) and error.reason == "stalled":
        return STALLED_STATUS
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
