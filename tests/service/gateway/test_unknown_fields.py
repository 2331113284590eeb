"""Fields that the gateway does not know, and those of other servers: ignored, accepted, or refused."""

import io
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest

from tests.support.gateway.body_parts import CALL, FUNCTION, HI
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, TOKENS = "/v1/messages", "/v1/messages/count_tokens", "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [HI, {"role": "assistant", "content": "yes", "tool_calls": [CALL]}, HI],
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get"}}]},
        },
    },
    TEXT: {"prompt": "hi", "stream_options": {}},
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "7"}]},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "reasoning": {"summary": "auto"},
        "text": {"format": {"type": "text"}},
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "get"}],
        },
    },
    MESSAGES: {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{"name": "get", "input_schema": {"type": "object"}}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low"},
    },
    COUNT: {"messages": [HI], "system": [{"type": "text", "text": "hi"}]},
    TOKENS: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}},
}
PATHS: dict[str, str] = {
    CHAT: "messages[0] messages[1].tool_calls[0].function tools[0].function response_format stream_options"
    " tool_choice tool_choice.allowed_tools tool_choice.allowed_tools.tools[0]"
    " tool_choice.allowed_tools.tools[0].function",
    TEXT: "stream_options",
    RESPONSES: "input[0] input[0].content[0] input[1] input[1].summary[0] input[2] input[3].output[0]"
    " tools[0] reasoning text text.format tool_choice tool_choice.tools[0]",
    MESSAGES: "messages[0] messages[0].content[0] tools[0] thinking output_config",
    COUNT: "system[0] messages[0]",
    TOKENS: "sampling_params",
}
"""By path: the objects in its body into which an unknown field is put, beside the body itself."""


def with_unknown(body: Any, where: str, value: Any, name: str = "aura") -> Any:
    """A copy of the body, in which the object at `where` has one field more."""
    if not where:
        return {**body, name: value}
    step, _, rest = where.partition(".")
    key, _, index = step.removesuffix("]").partition("[")
    inner = body[key]
    if not index:
        return {**body, key: with_unknown(inner, rest, value, name)}
    changed = list(inner)
    changed[int(index)] = with_unknown(changed[int(index)], rest, value, name)
    return {**body, key: changed}


def places(path: str) -> list[tuple[str, str]]:
    """The objects of a path's body, and the path of the unknown field in each."""
    return [("", "aura"), *((each, f"{each}.aura") for each in PATHS[path].split())]


def prompts(gateway: RunningGateway) -> list[Any]:
    found = [request["input_ids"] for request in gateway.engine.requests]
    gateway.engine.requests.clear()
    return found


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_ignored_and_named(gateway: RunningGateway, path: str) -> None:
    plain = gateway.post(path, BODIES[path])
    assert plain.status_code == 200, plain.text
    assert "x-weir-ignored-fields" not in plain.headers
    (prompt,) = prompts(gateway) or [plain.json()]
    for where, named in places(path):
        for stream in (False, True) if path not in (COUNT, TOKENS) else (False,):
            body = with_unknown(BODIES[path], where, {"value": [1]}) | ({"stream": True} if stream else {})
            reply = gateway.post(path, body)
            assert reply.status_code == 200, (named, reply.text)
            assert reply.headers["x-weir-ignored-fields"] == named
            assert (prompts(gateway) or [reply.json()]) == [prompt], named
            if path != COUNT:
                (turn,) = gateway.turns_of(reply)
                assert turn["ignored_fields"] == [named], stream
            nothing = gateway.post(path, with_unknown(BODIES[path], where, None))
            assert nothing.status_code == 200, (named, nothing.text)
            assert "x-weir-ignored-fields" not in nothing.headers, "null asks for nothing"
            prompts(gateway)


@pytest.fixture(scope="module")
def strict(own_backends: Backends) -> Iterator[RunningGateway]:
    own_backends.clear(None)
    with own_backends.ready_gateway(unknown_fields="refuse") as gateway:
        yield gateway


@pytest.mark.parametrize("path", BODIES)
def test_a_deployment_may_refuse_unknown_fields(strict: RunningGateway, path: str) -> None:
    for where, named in places(path):
        reply = strict.post(path, with_unknown(BODIES[path], where, 1))
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, named, "unknown_parameter")
        assert error["message"] == f"{named}: unknown field"
        assert strict.post(path, with_unknown(BODIES[path], where, None)).status_code == 200


def test_the_record_the_export_and_a_metric_have_what_was_ignored(gateway: RunningGateway) -> None:
    def calls() -> float:
        text = gateway.get("/metrics", key=ADMIN_KEY).text
        line = next(line for line in text.splitlines() if line.startswith(COUNTED))
        return float(line.rpartition(" ")[2])

    gateway.chat()
    before = calls()
    reply = gateway.chat(aura=1, mood=2)
    assert calls() == before + 1
    assert gateway.turns_of(reply)[0]["ignored_fields"] == ["aura", "mood"]
    rows = gateway.get("/admin/export", key=ADMIN_KEY).text
    assert [line.count('"ignored_fields":["aura","mood"]') for line in rows.splitlines()] == [0, 1]
    table = pq.read_table(io.BytesIO(gateway.get("/admin/export?format=parquet", key=ADMIN_KEY).content))
    assert table["ignored_fields"].to_pylist() == [[], ["aura", "mood"]]


COUNTED = 'weir_calls_with_ignored_fields_total{dialect="chat"}'


def test_whatever_a_field_is_called_the_header_can_hold_it(gateway: RunningGateway) -> None:
    odd = [
        "a b",
        "a,b",
        "\r\nx-evil: 1",
        "gr\u00fc\u00df",
        "\u540d\u524d",
        "\U0001f600",
        "%41",
        "",
        "\x00",
        '"',
    ]
    alone = gateway.post(CHAT, {"messages": [HI], "": 1})
    assert alone.headers["x-weir-ignored-fields"] == ""
    assert gateway.turns_of(alone)[0]["ignored_fields"] == [""]
    reply = gateway.post(CHAT, {"messages": [HI], **dict.fromkeys(odd, 1)})
    told = reply.headers["x-weir-ignored-fields"]
    assert told.isascii()
    assert told.isprintable()
    assert "x-evil" not in reply.headers
    assert [unquote(each) for each in told.split(", ")] == odd
    assert gateway.turns_of(reply)[0]["ignored_fields"] == odd
    lots = {f"\u540d{index}" + "x" * 500: 1 for index in range(500)}
    many = gateway.post(CHAT, {"messages": [HI], **lots})
    assert len(many.headers["x-weir-ignored-fields"]) <= 2048
    named = gateway.turns_of(many)[0]["ignored_fields"]
    assert (len(named), {len(each) for each in named}) == (32, {128})
    history = [HI | {"aura": 1}] * 100
    assert len(gateway.turns_of(gateway.post(CHAT, {"messages": history}))[0]["ignored_fields"]) == 32


ASKS_NOTHING: dict[str, Any] = {
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "best_of": 1,
    "n": 1,
    "priority": 0,
    "echo": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "logit_bias": {},
    "length_penalty": 1.0,
    "use_beam_search": False,
    "truncate_prompt_tokens": -1,
    "structured_outputs": {},
    "bad_words": [],
    "repetition_penalty": 1.0,
    "min_p": 0,
    "top_k": -1,
    "frequency_penalty": 0,
    "kv_transfer_params": {},
    "extra_body": {},
    "generationConfig": {},
    "reasoning_format": "parsed",
    "watermark": False,
    "banned_tokens": [],
    "enable_search": False,
    "minTokens": 0,
    "guided_json": None,
    "prompt_logprobs": None,
    "allowed_token_ids": None,
}
ASKS: dict[str, Any] = {
    "min_tokens": 5,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "separate_reasoning": False,
    "use_beam_search": True,
    "bad_words": ["no"],
    "mirostat": 2,
    "min_new_tokens": 4,
    "chat_template": "x",
    "safe_prompt": True,
    "ebnf": "root ::= x",
    "max_new_tokens": 4,
    "transforms": ["middle-out"],
    "extra_body": {"top_k": 5},
    "generationConfig": {"topK": 5},
    "reasoning_format": "hidden",
    "watermark": True,
    "banned_tokens": [7],
    "system_instruction": "be brief",
    "stop_words": ["x"],
    "min_length": 5,
    "prompt_truncate_len": 100,
    "top_n_sigma": 1.5,
    "minTokens": 5,
    "min-tokens": 5,
    "MIN_TOKENS": 5,
    " stopTokenIds": [7],
}
"""What would change the answer, and no path but that of token ids serves."""


@pytest.mark.parametrize("path", BODIES)
def test_what_asks_for_nothing_is_accepted_everywhere_and_what_asks_is_named(
    gateway: RunningGateway, path: str
) -> None:
    body = BODIES[path]
    own = {"temperature": 1.0} if path == COUNT else {}
    reply = gateway.post(path, body | ASKS_NOTHING | dict.fromkeys(own))
    assert reply.status_code == 200, reply.text
    assert "x-weir-ignored-fields" not in reply.headers
    inner = "sampling_params" if path == TOKENS else "stream_options"
    if inner in body:
        nothing = {"continuous_usage_stats": False} | (ASKS_NOTHING if path == TOKENS else {})
        reply = gateway.post(path, body | {inner: body[inner] | nothing})
        assert reply.status_code == 200, reply.text
        assert "x-weir-ignored-fields" not in reply.headers
        asking = gateway.post(path, body | {inner: {"continuous_usage_stats": True}}).json()["error"]
        assert asking["param"] == f"{inner}.continuous_usage_stats"
    for name, value in ASKS.items():
        error = gateway.post(path, body | {name: value}).json()["error"]
        assert error["param"] == name, (name, error)


def test_a_sampling_field_that_is_served_is_not_read_in_another_spelling(gateway: RunningGateway) -> None:
    for path, name in (
        (CHAT, "topP"),
        (TEXT, "max-tokens"),
        (MESSAGES, "stopSequences"),
        (RESPONSES, "Temperature"),
    ):
        error = gateway.post(path, BODIES[path] | {name: 0.5}).json()["error"]
        assert error["param"] == name
        assert gateway.post(path, BODIES[path] | {name: None}).status_code == 200
    inner = gateway.post(TOKENS, {"token_ids": [5], "sampling_params": {"topK": 5}}).json()["error"]
    assert (inner["param"], inner["message"]) == (
        "sampling_params.topK",
        "sampling_params.topK: write it top_k",
    )


def test_a_sampling_field_of_another_dialect_is_not_taken_for_an_unknown_one(gateway: RunningGateway) -> None:
    for path, field in (
        (RESPONSES, {"top_k": 5}),
        (RESPONSES, {"stop": ["x"]}),
        (RESPONSES, {"max_tokens": 9}),
        (MESSAGES, {"seed": 7}),
        (MESSAGES, {"logit_bias": {"5": 1}}),
        (MESSAGES, {"response_format": {"type": "json_object"}}),
        (CHAT, {"system": "be brief"}),
        (CHAT, {"stop_sequences": ["x"]}),
        (TEXT, {"tools": [{"type": "function", "function": FUNCTION}]}),
        (TOKENS, {"response_format": {"type": "json_object"}}),
    ):
        error = gateway.post(path, BODIES[path] | field).json()["error"]
        assert [error["param"]] == list(field), (path, error)
