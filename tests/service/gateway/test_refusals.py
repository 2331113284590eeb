"""Refused calls over HTTP: the shape of the error in each dialect, and each part of the gateway that refuses.

tests/unit/gateway/test_refusals.py has all bodies that are refused.
"""

from typing import Any

import pytest

from tests.support.gateway.running import RunningGateway

HI: Any = {"role": "user", "content": "hi"}
LONG: Any = {"role": "user", "content": "word " * 6000}
UNKNOWN: Any = {"type": "item_reference", "id": f"msg_{'0' * 32}"}
TOOL: Any = {"type": "function", "function": {"name": "get"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HI]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [HI], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [HI]},
    "/inference/v1/generate": {"token_ids": [5]},
}


def refused(gateway: RunningGateway, path: str, **fields: Any) -> tuple[Any, Any]:
    """The error of a call that leaves nothing behind, and the other fields of the reply."""
    reply = gateway.post(path, BODIES[path] | fields)
    assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json"), reply.text
    assert reply.headers["x-request-id"]
    assert not gateway.engine.requests
    assert gateway.get("/sessions").json()["data"] == []
    told = reply.json()
    error = told.pop("error")
    assert (set(error), error["type"]) == ({"message", "type", "param", "code"}, "invalid_request_error")
    return error, told


@pytest.mark.parametrize("path", BODIES)
def test_a_refusal_has_the_shape_of_its_dialect_and_leaves_nothing_behind(
    gateway: RunningGateway, path: str
) -> None:
    for stream in ({}, {"stream": True}):
        error, more = refused(gateway, path, misspelled=1, **stream)
        assert (error["param"], error["code"]) == ("misspelled", "unknown_parameter")
        assert more == ({"type": "error"} if "messages" in path else {})


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        ("/v1/chat/completions", {"temperature": 9}, "temperature", None),
        ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", None),
        ("/v1/chat/completions", {"messages": [HI | {"mood": "x"}]}, "messages[0].mood", None),
        ("/v1/chat/completions", {"model": "policy@x"}, "model", None),
        ("/v1/chat/completions", {"model": f"policy@{'9' * 5000}"}, "model", None),
        ("/v1/chat/completions", {"messages": [LONG]}, "messages", "context_length_exceeded"),
        ("/v1/completions", {"prompt": [[]]}, "prompt", None),
        ("/v1/responses", {"input": [UNKNOWN]}, "input[0].id", None),
    ],
    ids=["bound", "grammar", "inner", "policy", "endless number", "context", "empty prompt", "reference"],
)
def test_each_part_of_the_gateway_refuses_by_name(
    gateway: RunningGateway, path: str, fields: Any, param: str, code: str | None
) -> None:
    for stream in (False, True):
        error, _ = refused(gateway, path, **fields, stream=stream)
        assert (error["param"], error["code"]) == (param, code)


def test_embeddings_are_refused_in_a_sentence(gateway: RunningGateway) -> None:
    for path in ("/v1/embeddings", "/sessions/s1/v1/embeddings"):
        reply = gateway.post(path, {"input": "hi", "model": "m"})
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["code"]) == (404, "not_found_error", "not_supported")
        assert "generates text" in error["message"]
