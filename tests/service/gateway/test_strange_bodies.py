"""Any body gets an answer in the contract's shape and never a 500, and the next call is served."""

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gateway.examples import JSON, no_bodies
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.hypothesis_profiles import examples
from tests.support.tiny_model import VOCABULARY

CHAT_PATH = "/v1/chat/completions"
MESSAGES_PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
JSON_TYPE = {"content-type": "application/json"}
LAST_WORDS = {
    CHAT_PATH: ("[DONE]",),
    "/v1/completions": ("[DONE]",),
    "/v1/responses": ("response.completed", "response.incomplete"),
    MESSAGES_PATH: ("message_stop",),
}
"""The end of a complete stream in each dialect."""
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({}, optional={"name": JSON, "arguments": JSON})},
        optional={"id": JSON, "type": JSON},
    ),
    max_size=2,
)
PARTS = st.lists(
    st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "refusal"]), "text": JSON}),
    max_size=2,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "function"])},
    optional={
        "content": JSON | PARTS | st.text(max_size=9),
        "tool_calls": CALLS | JSON,
        "name": JSON,
        "x": JSON,
    },
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.dictionaries(st.text(max_size=4), JSON, max_size=2)}
    ),
    max_size=2,
)


def optional(*names: str) -> Any:
    """Only a few fields at a time, because the gateway looks only at the first fault of a body."""
    return st.dictionaries(st.sampled_from(names), JSON, max_size=2)


def merged(known: Any, other: Any) -> Any:
    return st.builds(lambda known, other: known | other, known, other)


STREAM = {"stream": st.booleans()}
CHAT = merged(
    st.fixed_dictionaries({"messages": st.lists(MESSAGES, max_size=3)}, optional={"tools": TOOLS, **STREAM}),
    optional(
        *("model", "temperature", "seed", "stop", "metadata", "max_tokens", "n", "logprobs"),
        *("stream_options", "tool_choice", "response_format", "logit_bias", "top_logprobs"),
    ),
)
TOKEN_IDS = st.lists(st.integers(0, 1030) | st.sampled_from([2**31, -1]) | JSON, max_size=3)
COMPLETION = merged(
    st.fixed_dictionaries(
        {"prompt": st.text(min_size=1, max_size=8) | TOKEN_IDS | st.lists(st.text(max_size=4) | TOKEN_IDS)},
        optional={"n": st.integers(0, 3), **STREAM},
    ),
    optional("model", "temperature", "echo", "logprobs", "stop", "suffix", "best_of", "logit_bias"),
)
TOKENS = merged(
    st.fixed_dictionaries(
        {"token_ids": TOKEN_IDS},
        optional={
            "sampling_params": optional(
                *("n", "temperature", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
                *("seed", "logprobs", "logit_bias", "routed_experts_prompt_start", "bad_words"),
            )
            | JSON
        },
    ),
    optional("model", "token_ids", "cache_salt", "priority", "features", "stream", "return_token_ids"),
)
WORDS = st.text(max_size=6) | st.just("x") | st.lists(PARTS, max_size=1) | JSON
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | JSON,
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        **dict.fromkeys(("content", "output", "summary", "id", "call_id", "name", "arguments"), WORDS),
    },
)
RESPONSE = merged(
    st.fixed_dictionaries({"input": st.text(max_size=8) | st.lists(ITEM, max_size=3)}, optional=STREAM),
    optional(
        *("instructions", "tools", "tool_choice", "text", "max_output_tokens", "previous_response_id"),
        *("include", "metadata", "temperature", "top_logprobs", "store", "reasoning"),
    ),
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"]) | JSON},
    optional={
        **dict.fromkeys(("id", "input", "tool_use_id", "content", "source"), WORDS),
        **dict.fromkeys(("text", "name"), st.text(max_size=6) | st.just("x") | JSON),
    },
)
SPOKEN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=9) | st.lists(BLOCK, max_size=3) | JSON,
    }
)
MESSAGE = merged(
    st.fixed_dictionaries(
        {"messages": st.lists(SPOKEN, max_size=3), "max_tokens": st.integers(1, 9)}, optional=STREAM
    ),
    optional(
        *("max_tokens", "model", "system", "tools", "tool_choice", "stop_sequences", "metadata", "top_k"),
        "temperature",
    ),
)
SESSION = optional(
    *("session_id", "task_id", "group_id", "group_size", "policy", "user", "train", "ttl_s"),
    *("metadata", "lineage", "sampling"),
)
PATHS: dict[str, Any] = {
    CHAT_PATH: CHAT,
    "/v1/completions": COMPLETION,
    "/inference/v1/generate": TOKENS,
    "/v1/responses": RESPONSE,
    MESSAGES_PATH: MESSAGE,
    COUNT_PATH: MESSAGE,
    "/sessions": SESSION,
    "/groups": st.builds(lambda known, size: known | {"size": size}, SESSION, st.integers(0, 3) | JSON),
    "/sessions/here/reward": merged(
        st.fixed_dictionaries({"value": st.integers(-9, 9)}), optional("value", "turn_id", "key", "source")
    ),
    "/sessions/here/finish": merged(
        st.fixed_dictionaries({"status": st.sampled_from(["completed", "failed"])}),
        optional("status", "reward", "reason"),
    ),
}


ENVELOPES: dict[str, Any] = {MESSAGES_PATH: {"type": "error"}, COUNT_PATH: {"type": "error"}}
"""The other fields of an error body, besides `error`."""


def check_answer(path: str, reply: httpx.Response, body: Any) -> None:
    """Check that the answer has the contract's shape."""
    assert reply.status_code in (200, 201, 400, 404, 409), (reply.status_code, body)
    assert reply.headers["x-request-id"]
    if reply.status_code >= 400:
        check_error(path, reply.json())
    elif reply.headers["content-type"].startswith("text/event-stream"):
        events = [line.partition("data: ")[2] for line in reply.text.splitlines() if "data: " in line]
        assert any(last in events[-1] for last in LAST_WORDS[path]), (reply.text, body)
    else:
        assert reply.json()


def check_error(path: str, said: Any) -> None:
    error = said.pop("error")
    assert said == ENVELOPES.get(path, {})
    assert set(error) == {"message", "type", "param", "code"}


def check_unhurt(gateway: RunningGateway) -> None:
    """Check that the engine got no request that could break it, and that calls are served as before."""
    for request in gateway.engine.requests:
        assert request["input_ids"]
        assert all(0 <= token_id < VOCABULARY for token_id in request["input_ids"])
        assert all(math.isfinite(number) for number in numbers_in(request["sampling_params"]))
        assert request["sampling_params"]["max_new_tokens"] >= 1
    assert gateway.chat(headers={"x-session-id": "afterwards"}).status_code == 200
    assert gateway.get("/ready").status_code == 200


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(inner)
    elif isinstance(value, int | float):
        yield value


def throw(gateway: RunningGateway, path: str, body: bytes) -> httpx.Response:
    reply: httpx.Response = gateway.call("POST", path, content=body, headers=JSON_TYPE)
    return reply


@pytest.mark.hypothesis
@pytest.mark.parametrize("path", PATHS)
def test_no_body_makes_a_500(gateway: RunningGateway, path: str) -> None:
    gateway.session(session_id="here")

    @settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
    @given(PATHS[path])
    def holds(body: Any) -> None:
        check_answer(path, throw(gateway, path, json.dumps(body).encode()), body)

    holds()
    check_unhurt(gateway)


SOUND: dict[str, bytes] = {
    "/v1/completions": b'{"prompt": "x", "max_tokens": 3}',
    "/v1/responses": b'{"input": "x", "max_output_tokens": 3}',
    "/inference/v1/generate": b'{"token_ids": [3], "cache_salt": "x"}',
    "/sessions": b'{"task_id": "x", "ttl_s": 3}',
    "/groups": b'{"task_id": "x", "size": 3}',
    "/sessions/here/reward": b'{"key": "x", "value": 3}',
    "/sessions/here/finish": b'{"reward": 3, "reason": "x", "status": "completed"}',
    **dict.fromkeys(
        (CHAT_PATH, MESSAGES_PATH, COUNT_PATH),
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}',
    ),
}
"""A valid body for each path."""


@st.composite
def broken(draw: Any, sound: bytes) -> bytes:
    """A valid body in which some bytes are replaced by others."""
    start, end = sorted((draw(st.integers(0, len(sound))), draw(st.integers(0, len(sound)))))
    put = draw(
        st.binary(max_size=6)
        | st.sampled_from(
            [b"\0", b"\\u0000", b"\\ud800", b"\xed\xa0\x80", b"\xff", b"1e999", b"-0", b"9" * 400]
        )
        | st.sampled_from([b"\xef\xbb\xbf", b"[" * 3000, b'{"a":' * 3000, b'"stream": true, ', b"NaN"])
    )
    body: bytes = sound[:start] + put + sound[end:]
    return body


@pytest.mark.hypothesis
@pytest.mark.parametrize("path", PATHS)
def test_no_broken_bytes_make_a_500(gateway: RunningGateway, path: str) -> None:
    gateway.session(session_id="here")

    @settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
    @given(broken(SOUND[path]))
    def holds(body: bytes) -> None:
        check_answer(path, throw(gateway, path, body), body)

    holds()
    check_unhurt(gateway)


@pytest.mark.parametrize("path", [path for path in PATHS if "/v1/" not in path])
def test_what_is_no_body_is_400(gateway: RunningGateway, path: str) -> None:
    """On the paths of operators and of harnesses; tests/unit has the bodies of the dialects."""
    gateway.session(session_id="here")
    for name, no_body in no_bodies(SOUND[path], b'"x"', b"3").items():
        reply = throw(gateway, path, no_body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), name
        check_error(path, reply.json())


@pytest.mark.parametrize("path", LAST_WORDS)
def test_of_a_field_that_is_there_twice_the_last_counts(gateway: RunningGateway, path: str) -> None:
    for stream, kind in (("false", "application/json"), ("true", "text/event-stream")):
        twice = f', "stream": null, "stream": {stream}}}'
        reply = throw(gateway, path, SOUND[path][:-1] + twice.encode())
        assert reply.status_code == 200, stream
        check_answer(path, reply, twice)
        assert reply.headers["content-type"].startswith(kind)


UNREADABLE = [
    ("/sessions", '{"metadata": {"a": 18446744073709551616}}'),
    ("/sessions", '{"metadata": {"a": "\\ud800"}}'),
    ("/sessions", '{"metadata": ' + '{"a":' * 5000 + "1" + "}" * 5001),
    ("/sessions", '{"sampling": {"max_tokens": 18446744073709551616}}'),
    ("/sessions", '{"lineage": "\\ud800"}'),
    ("/sessions/here/reward", '{"value": 1, "source": "\\ud800"}'),
    ("/admin/rollout_servers", '{"url": "http://\\ud800", "engine_url": "http://127.0.0.1:1", "id": "x"}'),
    ("/admin/policies", '{"location": "file:///\\ud800"}'),
    *(
        (MESSAGES_PATH, '{"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], ' + said + "}")
        for said in (
            '"thinking": {"type": "enabled", "budget_tokens": 18446744073709551616}',
            '"thinking": {"type": "enabled", "budget_tokens": true}',
            '"tools": [{"name": "get", "input_schema": {}, "defer_loading": "yes"}]',
            '"tools": [{"name": "get", "input_schema": {}, "strict": "yes"}]',
        )
    ),
    *(
        (
            MESSAGES_PATH,
            '{"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", '
            f'"content": [{{"type": "thinking", "thinking": {thought}}}]}}]}}',
        )
        for thought in ("5", '{"a": 1}')
    ),
]


def test_what_cannot_be_read_or_stored_is_400(gateway: RunningGateway) -> None:
    for path, said in UNREADABLE:
        key = ADMIN_KEY if path.startswith("/admin") else CLIENT_KEY
        reply = gateway.call("POST", path, content=said.encode(), headers=JSON_TYPE, key=key)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), said


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES_PATH, "/sessions"])
def test_a_body_in_another_encoding_is_400_in_words(gateway: RunningGateway, path: str) -> None:
    body = SOUND[path].replace(b'"x"', b'"caf\xe9"')
    for broken, why in ((body, "0xe9"), (body.replace(b'"m', b'"caf\xe9": 1, "m'), "0xe9")):
        reply = throw(gateway, path, broken)
        assert reply.status_code == 400
        assert why in reply.json()["error"]["message"]
    assert throw(gateway, path, b"\xef\xbb\xbf" + SOUND[path]).status_code in (200, 201)


def test_a_body_of_another_kind_is_415_on_every_path(gateway: RunningGateway) -> None:
    for path in (CHAT_PATH, "/sessions", "/groups", "/sessions/here/reward"):
        for kind in ("text/xml", "text/plain"):
            reply = gateway.call("POST", path, content=b"<a/>", headers={"content-type": kind})
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (415, "invalid_request_error"), (path, kind)


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZIP, identity": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
    "zstd,gzip": lambda body: gzip.compress(zstandard.compress(body)),
}


@cache
def bomb_of(coding: str) -> bytes:
    """A small body that becomes larger than a body may be."""
    return CODINGS[coding](b" " * (33 * 2**20))


@pytest.mark.parametrize("path", SOUND)
def test_a_compressed_body_is_read_on_every_path(gateway: RunningGateway, path: str) -> None:
    gateway.session(session_id="here")

    def send(body: bytes, coding: str) -> httpx.Response:
        headers = JSON_TYPE | {"content-encoding": coding}
        reply: httpx.Response = gateway.call("POST", path, content=body, headers=headers)
        if reply.status_code >= 400:
            check_error(path, reply.json())
        return reply

    for coding, pack in CODINGS.items():
        assert send(pack(SOUND[path]), coding).status_code in (200, 201), coding
        assert send(pack(SOUND[path])[:-1], coding).status_code == 400, coding
        assert send(bomb_of(coding), coding).status_code == 413, coding
    refused = send(SOUND[path], "br")
    assert refused.status_code == 415
    assert "gzip, deflate, zstd" in refused.text
    two_lines = [("content-encoding", "gzip"), ("content-encoding", "identity"), *JSON_TYPE.items()]
    lines = [*two_lines, ("authorization", f"Bearer {CLIENT_KEY}")]
    reply = gateway.http.post(gateway.url + path, content=gzip.compress(SOUND[path]), headers=lines)
    assert reply.status_code in (200, 201)


def test_a_key_of_strange_letters_is_401(gateway: RunningGateway) -> None:
    for key in ("sess-\xe9.\xe9", "sess-aGVyZQ.\xe9", "sess-", "sess-_w.x", "sess-xx.yy", "\xe9"):
        headers = {b"authorization": b"Bearer " + key.encode("latin-1")}
        reply = gateway.get("/v1/models", key=None, headers=headers)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error"), key


def test_a_body_over_the_limit_is_413_on_every_path(backends: Backends, gateway: RunningGateway) -> None:
    chunks = (b'{"metadata": ', b"[1]" * 50, b"}")
    with backends.gateway(max_body_bytes=100) as small:
        for path in (CHAT_PATH, "/sessions", "/groups", "/admin/policies"):
            reply = small.post(path, {"metadata": {"a": "x" * 200}}, key=ADMIN_KEY)
            assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error"), path
            reply = small.call("POST", path, content=iter(chunks), headers=JSON_TYPE, key=ADMIN_KEY)
            assert reply.status_code == 413, path
        assert small.post("/sessions", {}).status_code == 201
