"""A prompt that is far too long is refused before it costs time and memory, and changes no other prompt."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from gateway.errors import InvalidRequest
from gateway.language.token_budget import PIECE_CHARS, at_most
from gateway.language.tokenizer import PASSAGE_CHARS, BareTokenizer
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import CLIENT_KEY, RunningGateway

BODY_CHARS = 31 * 10**6
CONTEXT = 200_000
CALLS = 10
PROSE = "the quick brown fox jumps over 12 lazy dogs, and it goes on\n"
TEXTS = {"prose": PROSE, "one word": "x", "control tokens": "<|im_end|>", "spaces": " "}
PATHS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses": "messages",
}


@pytest.fixture(scope="module", params=[None, CONTEXT])
def bounded(
    request: pytest.FixtureRequest, processes: Processes
) -> Iterator[tuple[psutil.Process, RunningGateway]]:
    """Gateways of a short context, which the length of a text exceeds, and of a long one."""
    settings = {} if request.param is None else {"context_length": request.param}
    with processes.gateway(**settings) as (process, gateway):
        yield psutil.Process(process.pid), gateway


def body_of(path: str, text: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": text}
    if path == "/v1/responses":
        return {"input": text}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 5}


def cpu_s(process: psutil.Process) -> float:
    """The CPU time that a process has used, in seconds."""
    times = process.cpu_times()
    return times.user + times.system


def refused(gateway: RunningGateway, body: bytes) -> bool:
    json_type = {"content-type": "application/json"}
    reply = gateway.call("POST", "/v1/chat/completions", content=body, headers=json_type)
    return (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_too_long_leaves_memory_and_others_alone(
    bounded: tuple[psutil.Process, RunningGateway], tokenizer: Tokenizer, kind: str
) -> None:
    """Nobody waits for it, because it costs less than half of what its tokens would."""
    process, gateway = bounded
    text = (TEXTS[kind] * (BODY_CHARS // len(TEXTS[kind])))[:BODY_CHARS]
    body = json.dumps(body_of("/v1/chat/completions", text)).encode()
    gateway.http.timeout = httpx.Timeout(60)
    assert refused(gateway, body)
    before, began_s = process.memory_info().rss, cpu_s(process)
    for _ in range(CALLS):
        assert refused(gateway, body)
    call_s = (cpu_s(process) - began_s) / CALLS
    # Who kept the calls would keep the text of each; who does not keeps a few copies of the last one at most.
    assert process.memory_info().rss < before + CALLS * BODY_CHARS // 2
    began_s = time.process_time()
    tokenizer.encode(text[: BODY_CHARS // 20])
    assert call_s < 10 * (time.process_time() - began_s)
    assert gateway.turns(gateway.session()) == []


@pytest.mark.parametrize("path", PATHS)
def test_a_text_that_is_too_long_is_refused_by_name_in_every_dialect(
    bounded: tuple[psutil.Process, RunningGateway], path: str
) -> None:
    reply = bounded[1].post(path, body_of(path, PROSE * (2 * 10**6 // len(PROSE))))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", PATHS[path])


def test_many_messages_are_bounded_together(bounded: tuple[psutil.Process, RunningGateway]) -> None:
    messages = [{"role": role, "content": PROSE * 400} for role in ("user", "assistant")] * 200
    reply = bounded[1].post("/v1/chat/completions", {"messages": messages})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_counting_tokens_needs_a_session_that_exists(
    bounded: tuple[psutil.Process, RunningGateway],
) -> None:
    path, gateway = "/v1/messages/count_tokens", bounded[1]
    session = gateway.session()
    body = body_of(path, "hi")
    assert gateway.post(path, body, key=session["api_key"]).json()["input_tokens"] > 0
    assert gateway.call("DELETE", f"/sessions/{session['session_id']}").status_code == 200
    assert gateway.post(path, body, key=session["api_key"]).status_code == 410


def test_counting_tokens_counts_as_a_call(processes: Processes) -> None:
    path = "/v1/messages/count_tokens"
    with processes.gateway(limits__requests_per_minute=1) as (_, gateway):
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
