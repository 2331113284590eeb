"""Refused calls over HTTP: the shape of the error in each dialect, and each part of the gateway that refuses.

tests/unit/gateway/test_refusals.py has all bodies that are refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.errors import InvalidRequest
from gateway.language.tokenizer import PASSAGE_CHARS, PIECE_CHARS, BareTokenizer, at_most
from tests.support.gateway.body_parts import HI
from tests.support.gateway.running import CLIENT_KEY, Backends, RunningGateway
from tests.support.waiting import wait_until

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
    for stream in (False, True):
        error, more = refused(gateway, path, mirostat=2, **({"stream": True} if stream else {}))
        assert (error["param"], error["code"]) == ("mirostat", None), stream
        assert more == ({"type": "error"} if "messages" in path else {})


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        ("/v1/chat/completions", {"temperature": 9}, "temperature", None),
        ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", None),
        ("/v1/chat/completions", {"messages": [HI | {"tool_calls": [1]}]}, "messages[0].tool_calls", None),
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
        assert (error["param"], error["code"]) == (param, code), stream


def test_embeddings_are_refused_in_a_sentence(gateway: RunningGateway) -> None:
    for path in ("/v1/embeddings", "/sessions/s1/v1/embeddings"):
        reply = gateway.post(path, {"input": "hi", "model": "m"})
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["code"]) == (404, "not_found_error", "not_supported")
        assert "generates text" in error["message"], path


# A prompt that is far too long

CONTEXT = 200_000
PROSE = "the quick brown fox jumps over 12 lazy dogs, and it goes on\n"
FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses": "messages",
}


@pytest.fixture(scope="module", params=[None, CONTEXT])
def bounded(request: pytest.FixtureRequest, own_backends: Backends) -> Iterator[RunningGateway]:
    """Gateways of a short context, which the length of a text exceeds, and of a long one."""
    own_backends.clear(None)
    with own_backends.gateway(context_length=request.param) as gateway:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        yield gateway


def body_of(path: str, text: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": text}
    if path == "/v1/responses":
        return {"input": text}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 5}


def test_a_text_that_is_too_long_is_refused_by_name_in_every_dialect(bounded: RunningGateway) -> None:
    for path, param in FIELDS.items():
        reply = bounded.post(path, body_of(path, PROSE * (10**6 // len(PROSE))))
        error = reply.json()["error"]
        assert reply.status_code == 400, path
        assert (error["code"], error["param"]) == ("context_length_exceeded", param), path


def test_many_messages_are_bounded_together(bounded: RunningGateway) -> None:
    messages = [{"role": role, "content": PROSE * 400} for role in ("user", "assistant")] * 200
    reply = bounded.post("/v1/chat/completions", {"messages": messages})
    assert reply.json()["error"]["code"] in ("context_length_exceeded", "too_many_values"), (
        "it has many commas"
    )


def test_counting_tokens_needs_a_session_that_exists(gateway: RunningGateway) -> None:
    path = "/v1/messages/count_tokens"
    session = gateway.session()
    body = body_of(path, "hi")
    assert gateway.post(path, body, key=session["api_key"]).json()["input_tokens"] > 0
    assert gateway.call("DELETE", f"/sessions/{session['session_id']}").status_code == 200
    assert gateway.post(path, body, key=session["api_key"]).status_code == 410


def test_counting_tokens_counts_as_a_call(own_backends: Backends) -> None:
    path = "/v1/messages/count_tokens"
    with own_backends.gateway(limits={"requests_per_minute": 1}) as gateway:
        for key in (CLIENT_KEY, gateway.session()["api_key"]):
            statuses = [gateway.post(path, body_of(path, "hi"), key=key).status_code for _ in range(2)]
            assert statuses[-1] == 429


def test_a_text_in_pieces_has_the_tokens_of_the_whole(tiny_model: Path, tokenizer: Tokenizer) -> None:
    bare = BareTokenizer(tiny_model, None)
    for text in (PROSE, "x", "\u4f60\u597d", " ", "a\n\n b", "it's 1234 \u00e9t\u00e9 e\u0301 "):
        whole = text * ((PASSAGE_CHARS + 3 * PIECE_CHARS) // len(text))
        assert bare.encode(whole) == tokenizer.encode(whole).ids, text


def test_a_budget_refuses_a_long_text_only_beyond_its_tokens(tiny_model: Path) -> None:
    tokenizer = BareTokenizer(tiny_model, None)
    for text in (PROSE * 3000, "x" * 150_000):
        count = len(tokenizer.encode(text))
        with at_most(count, count, "messages"):
            assert len(tokenizer.encode(text)) == count
        with at_most(count - 1, count, "messages"), pytest.raises(InvalidRequest):
            tokenizer.encode(text)
