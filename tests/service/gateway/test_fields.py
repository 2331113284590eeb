"""Fields of requests, messages, parts, items and tools that change no token, and what is left out."""

from typing import Any

import pytest

from tests.support.gateway.running import RunningGateway

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI: Any = {"role": "user", "content": "hi"}
FUNCTION: Any = {"name": "get", "parameters": {"type": "object"}}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
TOOL: Any = {"type": "function", **FUNCTION}
MY_TOOL: Any = {"name": "get", "input_schema": {"type": "object"}}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}
ITEM_CALL: Any = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c", "output": "7"}
USE: Any = {"type": "tool_use", "id": "c", "name": "get", "input": {}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
TEXT: Any = {"type": "text", "text": "hi"}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [HI], "max_tokens": 9},
}


OF_THE_REQUEST: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "store": True,
            "service_tier": "auto",
            "safety_identifier": "x",
            "prompt_cache_key": "x",
            "prompt_cache_retention": "24h",
            "prediction": {"type": "content", "content": "hello"},
            "modalities": ["text"],
            "verbosity": "medium",
            "functions": None,
            "continue_final_message": False,
            "add_generation_prompt": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
            "metadata": {"run": "x" * 512},
        },
    ),
    (
        RESPONSES,
        {
            "truncation": "disabled",
            "background": False,
            "client_metadata": {"x-codex-installation-id": "x"},
            "service_tier": "auto",
            "prompt_cache_key": "x",
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"summary": "auto"},
            "stream_options": {"include_obfuscation": False},
        },
    ),
    (
        MESSAGES,
        {
            "cache_control": {"type": "ephemeral"},
            "service_tier": "auto",
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "thinking": {"type": "adaptive"},
            "mcp_servers": [],
            "speed": "standard",
        },
    ),
]
SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        CHAT,
        {
            "messages": [
                HI | {"content": [TEXT | CACHED, TEXT | {"prompt_cache_breakpoint": {"type": "x"}}]},
                {
                    "role": "assistant",
                    "content": "yes",
                    "refusal": None,
                    "audio": None,
                    "annotations": [],
                    "function_call": None,
                    "parsed": None,
                    "provider_specific_fields": {},
                    "tool_calls": [
                        CALL | {"index": 0, "function": {**CALL["function"], "parsed_arguments": {}}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "7", "name": "get"} | CACHED,
            ],
            "tools": [CHAT_TOOL | CACHED],
        },
        {
            "messages": [
                HI | {"content": "hihi"},
                {"role": "assistant", "content": "yes", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "7", "name": "get"},
            ],
            "tools": [CHAT_TOOL],
        },
    ),
    (
        CHAT,
        {"messages": [HI, {"role": "assistant", "content": None, "refusal": "no"}, HI]},
        {"messages": [HI, {"role": "assistant", "content": "no"}, HI]},
    ),
    (
        RESPONSES,
        {
            "input": [
                HI
                | {"type": "message", "id": "msg_1", "status": "completed"}
                | {"internal_chat_message_metadata_passthrough": {"turn_id": "t1"}},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_2",
                    "status": "completed",
                    "phase": "commentary",
                    "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}],
                },
                ITEM_CALL
                | {"id": "fc_1", "status": "completed", "caller": {"type": "direct"}, "namespace": None},
                OUTPUT | {"id": "fco_1", "status": "completed"},
            ],
            "tools": [TOOL | {"strict": None, "defer_loading": False, "allowed_callers": ["direct"]}],
        },
        {"input": [HI, {"role": "assistant", "content": "yes"}, ITEM_CALL, OUTPUT], "tools": [TOOL]},
    ),
    (
        MESSAGES,
        {
            "max_tokens": 9,
            "system": [TEXT | CACHED],
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": [TEXT | {"citations": None}, USE | {"caller": {"type": "direct"}} | CACHED],
                },
                {"role": "user", "content": [RESULT | CACHED | {"is_error": True}]},
            ],
            "tools": [MY_TOOL | CACHED | {"type": "custom", "eager_input_streaming": True}],
        },
        {
            "max_tokens": 9,
            "system": "hi",
            "messages": [
                HI,
                {"role": "assistant", "content": [TEXT, USE]},
                {"role": "user", "content": [RESULT]},
            ],
            "tools": [MY_TOOL],
        },
    ),
    *((path, BODIES[path] | fields, BODIES[path]) for path, fields in OF_THE_REQUEST),
]


@pytest.mark.parametrize(("path", "given", "plain"), SAME)
def test_what_sdks_add_changes_no_token(
    gateway: RunningGateway, path: str, given: dict[str, Any], plain: dict[str, Any]
) -> None:
    for body in (given, plain):
        reply = gateway.post(path, body)
        assert reply.status_code == 200, reply.text
    one, two = gateway.engine.requests
    assert one["input_ids"] == two["input_ids"]


SEALED: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
REDACTED: Any = {"type": "redacted_thinking", "data": "x"}
WEB: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
ELSEWHERE: list[Any] = [
    {"type": "web_search"},
    TOOL,
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "x", "server_url": "http://x"},
    {"type": "custom", "name": "apply_patch"},
]
SAID: Any = {"role": "assistant", "content": [TEXT]}
LEFT_OUT: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    (RESPONSES, {"tools": ELSEWHERE}, {"tools": [TOOL]}, ["code_interpreter", "custom", "mcp", "web_search"]),
    (RESPONSES, {"input": [HI, SEALED, HI]}, {"input": [HI, HI]}, ["reasoning"]),
    (MESSAGES, {"tools": [MY_TOOL, WEB]}, {"tools": [MY_TOOL]}, ["web_search"]),
    (
        MESSAGES,
        {"messages": [HI, {"role": "assistant", "content": [REDACTED, TEXT]}, HI]},
        {"messages": [HI, SAID, HI]},
        ["redacted_thinking"],
    ),
]


@pytest.mark.parametrize(("path", "fields", "plain", "kinds"), LEFT_OUT)
def test_what_the_model_does_not_get_is_recorded_and_told(
    gateway: RunningGateway, path: str, fields: dict[str, Any], plain: dict[str, Any], kinds: list[str]
) -> None:
    (whole,) = gateway.turns_of(gateway.post(path, BODIES[path] | plain))
    assert "left_out" not in whole["sampling"]["asked"]
    for stream in (False, True):
        reply = gateway.post(path, BODIES[path] | fields | {"stream": stream})
        (turn,) = gateway.turns_of(reply)
        assert turn["sampling"]["asked"]["left_out"] == kinds, stream
        assert f'"left_out":["{kinds[0]}"' in reply.headers["x-weir-sampling-asked"]
        assert turn["context_ids"] == whole["context_ids"], stream


def test_the_models_one_verbosity_serves_all_and_the_turn_records_the_one_asked(
    gateway: RunningGateway,
) -> None:
    for path, fields in ((CHAT, {"verbosity": "low"}), (RESPONSES, {"text": {"verbosity": "low"}})):
        (turn,) = gateway.turns_of(gateway.post(path, BODIES[path] | fields))
        assert turn["sampling"]["asked"]["verbosity"] == "low", path
