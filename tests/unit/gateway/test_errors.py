"""Each of the gateway's errors is in the tree that `gateway.errors` draws, and has an HTTP status."""

import pytest

from gateway import errors
from gateway.edge.errors import api_error
from gateway.errors import (
    EngineFault,
    GatewayError,
    InvalidRequest,
    LimitReached,
    NoServer,
    NotPermitted,
    ObjectNotFound,
    RequestRefused,
    StateConflict,
    UnknownCaller,
)
from gateway.fleet.event_stream import engine_error
from rollout_queue.contract.errors import SessionDeleted, StorageUnavailable


def test_the_tree_is_drawn() -> None:
    assert errors.__doc__ is not None
    drawn = {line.split("─ ")[1].split()[0] for line in errors.__doc__.splitlines() if "─ " in line}
    assert drawn == {each.__name__ for each in descendants(GatewayError)}


def descendants(kind: type[Exception]) -> list[type[Exception]]:
    return [each for child in kind.__subclasses__() for each in (child, *descendants(child))]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error"),
        (RequestRefused("x"), 400, "invalid_request_error"),
        (UnknownCaller("x"), 401, "authentication_error"),
        (NotPermitted("x"), 403, "permission_error"),
        (ObjectNotFound("x"), 404, "not_found_error"),
        (StateConflict("x"), 409, "conflict_error"),
        (SessionDeleted("x"), 410, "gone_error"),
        (LimitReached("x", code="rate_limited", retry_s=7), 429, "rate_limit_error"),
        (NoServer("x"), 503, "engine_unavailable"),
        (EngineFault("busy", "x"), 503, "engine_unavailable"),
        (StorageUnavailable("x"), 503, "storage_unavailable"),
        (EngineFault("stalled", "x"), 504, "timeout_error"),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int, kind: str) -> None:
    assert isinstance(error, GatewayError | SessionDeleted | StorageUnavailable)
    said = api_error(error)
    assert (said.status, said.type) == (status, kind)


def test_an_error_says_what_it_knows() -> None:
    limit = api_error(LimitReached("x", code="rate_limited", retry_s=7))
    assert (limit.code, limit.headers["retry-after"]) == ("rate_limited", "7")
    assert api_error(NoServer("x")).headers["retry-after"] == "1"
    assert api_error(StateConflict("x", param="id")).param == "id"


def test_an_engine_that_writes_another_encoding_is_told_as_it_wrote() -> None:
    for body in (b'{"error": "caf\xe9"}', b'{"error": {"message": "caf\xe9"}}', "caf\xe9".encode("utf-16")):
        assert isinstance(engine_error(500, body), EngineFault)
    assert "caf\ufffd" in str(engine_error(400, b'{"error": "caf\xe9"}'))
