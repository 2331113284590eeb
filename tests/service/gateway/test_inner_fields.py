"""Every field inside a message, a part, an item or a tool is served, accepted because it changes nothing, or
refused by its path."""

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
DOCUMENT: Any = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}


def answered(**fields: Any) -> Any:
    return [HI, {"role": "assistant", "content": "yes", **fields}, HI]


def said(*blocks: Any, role: str = "user", **fields: Any) -> Any:
    return [{"role": role, "content": list(blocks), **fields}, *([HI] if role == "assistant" else [])]


IN_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": [HI | {"mood": "x"}]}, "messages[0].mood"),
    ({"messages": [HI | {"name": 7}]}, "messages[0].name"),
    ({"messages": [HI | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": answered(audio={"id": "a"})}, "messages[1].audio"),
    ({"messages": answered(prefix=True)}, "messages[1].prefix"),
    ({"messages": answered(reasoning={"text": "x"})}, "messages[1].reasoning"),
    ({"messages": answered(reasoning_details=[{"text": "x"}])}, "messages[1].reasoning_details"),
    ({"messages": answered(tool_calls=[CALL | {"extra": 1}])}, "messages[1].tool_calls[0].extra"),
    (
        {"messages": answered(tool_calls=[CALL, {"type": "custom", "custom": {"name": "x"}}])},
        "messages[1].tool_calls[1]",
    ),
    (
        {"messages": answered(tool_calls=[CALL | {"function": FUNCTION}])},
        "messages[1].tool_calls[0].function.parameters",
    ),
    (
        {"messages": said(TEXT, {"type": "image_url", "image_url": {"url": "x"}})},
        "messages[0].content[1]",
    ),
    ({"messages": said(TEXT, TEXT | {"lang": "de"})}, "messages[0].content[1].lang"),
    ({"tools": [CHAT_TOOL | {"defer": True}]}, "tools[0].defer"),
    ({"tools": [{"type": "function", "function": FUNCTION | {"returns": {}}}]}, "tools[0].function.returns"),
    ({"response_format": {"type": "json_object", "indent": 2}}, "response_format.indent"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "draft": 7}}},
        "response_format.json_schema.draft",
    ),
    (
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "get", "times": 2}}},
        "tool_choice.function.times",
    ),
]
IN_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": [HI | {"mood": "x"}]}, "input[0].mood"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "n": 1}]}]},
        "input[0].content[0].n",
    ),
    ({"input": [HI, ITEM_CALL | {"namespace": "crm"}]}, "input[1].namespace"),
    ({"input": [HI, ITEM_CALL, OUTPUT | {"caller": {"type": "program"}}]}, "input[2].caller"),
    ({"input": [HI, {"type": "reasoning", "summary": [], "depth": 2}]}, "input[1].depth"),
    ({"input": [HI, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, "input[1].type"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [TOOL | {"output_schema": {"type": "object"}}]}, "tools[0].output_schema"),
    ({"tools": [TOOL | {"colour": "red"}]}, "tools[0].colour"),
    ({"tools": [TOOL, {"type": "telepathy"}]}, "tools[1].type"),
    ({"tools": [TOOL, {"type": "local_shell"}]}, "tools[1].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "draft": 7}}}, "text.format.draft"),
]
IN_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [HI | {"mood": "x"}]}, "messages[0].mood"),
    ({"messages": said(TEXT | {"lang": "de"})}, "messages[0].content[0].lang"),
    ({"messages": said(DOCUMENT | {"title": "t"})}, "messages[0].content[0].title"),
    ({"messages": said(DOCUMENT | {"citations": {"enabled": True}})}, "messages[0].content[0].citations"),
    (
        {"messages": said({"type": "document", "source": {"type": "base64", "data": ""}})},
        "messages[0].content[0].source",
    ),
    ({"messages": said({"type": "search_result", "content": [TEXT]})}, "messages[0].content[0].type"),
    ({"messages": said({"type": "telepathy"})}, "messages[0].content[0].type"),
    ({"messages": said(USE)}, "messages[0].content[0].type"),
    (
        {"messages": said(RESULT | {"content": [TEXT, {"type": "tool_reference", "tool_name": "x"}]})},
        "messages[0].content[0].content[1].type",
    ),
    (
        {
            "messages": said(
                TEXT, {"type": "server_tool_use", "id": "s", "name": "web_search"}, role="assistant"
            )
        },
        "messages[0].content[1].type",
    ),
    (
        {"messages": said({"type": "web_search_tool_result", "content": []}, role="assistant")},
        "messages[0].content[0].type",
    ),
    (
        {"messages": said(USE | {"toolset_name": "crm"}, role="assistant")},
        "messages[0].content[0].toolset_name",
    ),
    ({"system": [TEXT | {"lang": "de"}]}, "system[0].lang"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [MY_TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [MY_TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": [MY_TOOL | {"colour": "red"}]}, "tools[0].colour"),
    ({"tools": [MY_TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [MY_TOOL], "tool_choice": {"type": "any", "times": 2}}, "tool_choice.times"),
]
REFUSED = [
    *((CHAT, {"messages": [HI], **body}, param) for body, param in IN_CHAT),
    *((RESPONSES, {"input": "hi", **body}, param) for body, param in IN_RESPONSES),
    *((MESSAGES, {"messages": [HI], "max_tokens": 9, **body}, param) for body, param in IN_MESSAGES),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_an_inner_field_that_is_not_served_is_a_400_with_its_path(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    reply = gateway.post(path, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")
    assert not gateway.engine.requests


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
