"""A prompt that is far too long is refused by name, and changes no other prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.errors import InvalidRequest
from gateway.language.token_budget import PIECE_CHARS, at_most
from gateway.language.tokenizer import PASSAGE_CHARS, BareTokenizer
from tests.support.gateway.running import CLIENT_KEY, Backends, RunningGateway
from tests.support.waiting import wait_until

CONTEXT = 200_000
PROSE = "the quick brown fox jumps over 12 lazy dogs, and it goes on\n"
PATHS = {
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


@pytest.mark.parametrize("path", PATHS)
def test_a_text_that_is_too_long_is_refused_by_name_in_every_dialect(
    bounded: RunningGateway, path: str
) -> None:
    reply = bounded.post(path, body_of(path, PROSE * (2 * 10**6 // len(PROSE))))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", PATHS[path])


def test_many_messages_are_bounded_together(bounded: RunningGateway) -> None:
    messages = [{"role": role, "content": PROSE * 400} for role in ("user", "assistant")] * 200
    reply = bounded.post("/v1/chat/completions", {"messages": messages})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_counting_tokens_needs_a_session_that_exists(
    bounded: RunningGateway,
) -> None:
    path, gateway = "/v1/messages/count_tokens", bounded
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


@pytest.mark.parametrize(
    "text", [PROSE, "x", "\u4f60\u597d", " ", "a\n\n b", "it's 1234 \u00e9t\u00e9 e\u0301 "]
)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    tiny_model: Path, tokenizer: Tokenizer, text: str
) -> None:
    whole = text * ((PASSAGE_CHARS + 3 * PIECE_CHARS) // len(text))
    assert BareTokenizer(tiny_model, None).encode(whole) == tokenizer.encode(whole).ids


def test_a_budget_refuses_a_long_text_only_beyond_its_tokens(tiny_model: Path) -> None:
    tokenizer = BareTokenizer(tiny_model, None)
    for text in (PROSE * 3000, "x" * 150_000):
        count = len(tokenizer.encode(text))
        with at_most(count, count, "messages"):
            assert len(tokenizer.encode(text)) == count
        with at_most(count - 1, count, "messages"), pytest.raises(InvalidRequest):
            tokenizer.encode(text)
