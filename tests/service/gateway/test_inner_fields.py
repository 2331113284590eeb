"""Fields inside a message, a part, an item or a tool that are accepted, because they change nothing."""

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
]


@pytest.mark.parametrize(("path", "given", "plain"), SAME)
def test_what_sdks_add_to_a_conversation_changes_no_token(
    gateway: RunningGateway, path: str, given: dict[str, Any], plain: dict[str, Any]
) -> None:
    for body in (given, plain):
        reply = gateway.post(path, body)
        assert reply.status_code == 200, reply.text
    one, two = gateway.engine.requests
    assert one["input_ids"] == two["input_ids"]


LEFT_OUT: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        RESPONSES,
        {"tools": [{"type": "web_search"}, TOOL, {"type": "custom", "name": "apply_patch"}]},
        ["custom", "web_search"],
    ),
    (
        RESPONSES,
        {"input": [HI, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}, HI]},
        ["reasoning"],
    ),
    (
        MESSAGES,
        {"tools": [MY_TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
        ["web_search"],
    ),
    (
        MESSAGES,
        {
            "messages": [
                HI,
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, TEXT]},
                HI,
            ]
        },
        ["redacted_thinking"],
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "kinds"), LEFT_OUT)
def test_what_the_model_does_not_get_is_recorded_and_told(
    gateway: RunningGateway, path: str, fields: dict[str, Any], kinds: list[str], stream: bool
) -> None:
    plain: dict[str, Any] = {"input": "hi"} if path == RESPONSES else {"messages": [HI], "max_tokens": 9}
    reply = gateway.post(path, plain | fields | {"stream": stream})
    assert reply.status_code == 200, reply.text
    (turn,) = gateway.turns({"session_id": reply.headers["x-weir-session-id"]})
    assert turn["sampling"]["asked"]["left_out"] == kinds
    assert f'"left_out":["{kinds[0]}"' in reply.headers["x-weir-sampling-asked"]


def test_a_plain_call_leaves_nothing_out(gateway: RunningGateway) -> None:
    reply = gateway.post(RESPONSES, {"input": "hi", "tools": [TOOL]})
    (turn,) = gateway.turns({"session_id": reply.headers["x-weir-session-id"]})
    assert "left_out" not in turn["sampling"]["asked"]
