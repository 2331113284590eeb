"""Fields of requests, messages, parts, items and tools that change no token, and what is left out."""

from typing import Any

import pytest

from tests.support.gateway.body_parts import (
    CALL,
    CHAT_TOOL,
    FUNCTION,
    HI,
    ITEM_CALL,
    MY_TOOL,
    OUTPUT,
    RESULT,
    TEXT,
    TOOL,
    USE,
)
from tests.support.gateway.running import RunningGateway

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
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
                    "id": "msg_1",
                    "index": 0,
                    "status": "completed",
                    "phase": "final_answer",
                    "logprobs": {"content": []},
                    "tool_calls": [
                        CALL | {"index": 0, "function": {**CALL["function"], "parsed_arguments": {}}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "7", "name": "get", "id": "m3"} | CACHED,
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
LATER: Any = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
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
    (MESSAGES, {"tools": [MY_TOOL, LATER]}, {"tools": [MY_TOOL]}, ["defer_loading"]),
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


def test_a_history_with_stamped_messages_extends(gateway: RunningGateway) -> None:
    stamps = {"id": "msg_1", "index": 0, "status": "completed", "phase": "final_answer", "logprobs": None}
    session = gateway.session()
    history = [HI | {"id": "msg_0"}]
    for turn in range(3):
        reply = gateway.post(f"/sessions/{session['session_id']}{CHAT}", {"messages": history})
        assert reply.status_code == 200, reply.text
        assert "x-weir-ignored-fields" not in reply.headers
        history += [reply.json()["choices"][0]["message"] | stamps, HI | {"id": f"msg_{turn}"}]
    assert [turn["relation"] for turn in gateway.turns(session)] == ["root", "extends", "extends"]


def test_a_deferred_tool_is_in_the_prompt_once_the_history_refers_to_it(gateway: RunningGateway) -> None:
    search: Any = {"name": "search", "input_schema": {"type": "object"}}
    other: Any = LATER | {"name": "never"}
    found: Any = [{"type": "tool_reference", "tool_name": "later"}]
    history: list[Any] = [
        HI,
        {"role": "assistant", "content": [USE | {"name": "search"}]},
        {"role": "user", "content": [RESULT | {"content": found}]},
    ]

    def asked(messages: list[Any], *tools: Any) -> tuple[str, list[str]]:
        """The prompt of a call, and what it leaves out."""
        body = BODIES[MESSAGES] | {"messages": messages, "tools": tools}
        reply = gateway.post(MESSAGES, body)
        (turn,) = gateway.turns_of(reply)
        count = gateway.post(f"{MESSAGES}/count_tokens", {"messages": messages, "tools": tools}).json()
        assert count["input_tokens"] == turn["context_len"]
        prompt = gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"])
        return prompt, turn["sampling"]["asked"].get("left_out", [])

    before, left_out = asked([HI], search, LATER, other)
    assert ("later" in before, left_out) == (False, ["defer_loading"])
    after, left_out = asked(history, search, LATER, other)
    assert ('"name": "later"' in after, "never" in after, left_out) == (True, False, ["defer_loading"])
    assert asked(history, search, LATER)[1] == []
    assert asked(history, search, LATER)[0] == asked(history, search, MY_TOOL | {"name": "later"})[0]
    hosted: Any = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert asked([HI], hosted, MY_TOOL, LATER)[1] == ["tool_search_tool_regex"], "nobody could find it"


def test_a_tools_name_twice_is_refused_by_name(gateway: RunningGateway) -> None:
    for path, fields, param in (
        (CHAT, {"tools": [CHAT_TOOL, CHAT_TOOL]}, "tools[1].function.name"),
        (CHAT, {"functions": [FUNCTION, FUNCTION]}, "functions[1].name"),
        (RESPONSES, {"tools": [TOOL, {"type": "web_search"}, TOOL]}, "tools[2].name"),
        (MESSAGES, {"tools": [MY_TOOL, LATER, MY_TOOL]}, "tools[2].name"),
        (MESSAGES, {"tools": [MY_TOOL, LATER, LATER]}, "tools[2].name"),
    ):
        error = gateway.post(path, BODIES[path] | fields).json()["error"]
        assert error["param"] == param, error
        assert "has the name" in error["message"]
