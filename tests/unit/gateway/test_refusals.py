"""What a dialect does not serve is a 400 that names the field. A few such bodies go through HTTP, in
tests/service/gateway/test_refusals.py."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.callers.identity import Caller
from gateway.dialects.base import Dialect
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.messages import Messages, request_of
from gateway.dialects.responses import Responses
from gateway.dialects.token_ids import TokenIdsDialect
from gateway.edge.errors import api_error
from gateway.errors import InvalidRequest
from gateway.language.render import ChatRenderer
from gateway.language.schema import MAX_BYTES
from tests.support.gateway.body_parts import (
    CALL,
    CHAT_TOOL,
    FUNCTION,
    GET_IT,
    HI,
    ITEM_CALL,
    MY_TOOL,
    OTHER,
    OUTPUT,
    RESULT,
    TEXT,
    TOOL,
    USE,
)
from tests.support.gateway.examples import no_bodies
from tests.support.gateway.families_agent import renderer_of

Row = tuple[Any, str | None]
"""Fields that replace those of a sound body, or the bytes of a body; and the field that the error names."""
SCHEMA: Any = {"type": "object", "properties": {}}
CUSTOM: Any = {"type": "custom", "custom": {"name": "x"}}
PART: Any = {"type": "input_image", "image_url": "http://x/y.png"}
DOCUMENT: Any = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


def answered(**fields: Any) -> Any:
    return [HI, {"role": "assistant", "content": "yes", **fields}, HI]


def said(*blocks: Any, role: str = "user") -> Any:
    return [{"role": role, "content": list(blocks)}]


def told(*blocks: Any) -> Any:
    return [*said(*blocks, role="assistant"), HI]


def tool(**fields: Any) -> Any:
    """A tool of a chat, whose function has these fields."""
    return {"type": "function", "function": {"name": "get", **fields}}


def given(*parts: Any) -> Any:
    """A body of Responses in which the user says these parts."""
    return {"input": [{"role": "user", "content": list(parts)}]}


def begun(content: Any) -> Any:
    return [HI, {"role": "assistant", "content": content}]


CHAT: list[Row] = [
    ({"function_call": "auto"}, "function_call"),
    ({"functions": [FUNCTION], "function_call": {"name": "put"}}, "function_call"),
    ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
    ({"functions": [FUNCTION], "tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": ""}]}, "functions[0].name"),
    ({"functions": [FUNCTION | {"returns": {}}]}, "functions[0].returns"),
    ({"chat_template_kwargs": {"date": "x"}}, "chat_template_kwargs.date"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
    (
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking",
    ),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    *(({"guided_regex": regex}, "guided_regex") for regex in ("(.{0,900}){0,900}", "")),
    *(({"guided_json": schema}, "guided_json") for schema in ("[]", "{", {"$ref": "http://x"})),
    *(({"guided_choice": choices}, "guided_choice") for choices in ([], ["a", ""])),
    ({"guided_json": SCHEMA, "regex": "a+"}, "regex"),
    ({"regex": "a+", "response_format": {"type": "json_object"}}, "regex"),
    ({"ebnf": "root ::= [a]"}, "ebnf"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"stream_options": {"tokens": True}}, "stream_options.tokens"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "contents": "hi"}]}, "messages[0].contents"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [HI, {"role": "user"}]}, "messages[1].content"),
    ({"messages": answered(content=None, function_call="get")}, "messages[1].function_call"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [tool(name=7)]}, "tools[0].function.name"),
    ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
    ({"tools": [tool(description=7)]}, "tools[0].function.description"),
    ({"messages": [HI | {"mood": "x"}]}, "messages[0].mood"),
    ({"messages": [HI | {"name": 7}]}, "messages[0].name"),
    ({"messages": [HI | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": answered(audio={"id": "a"})}, "messages[1].audio"),
    ({"messages": answered(prefix=True)}, "messages[1].prefix"),
    ({"messages": answered(reasoning={"text": "x"})}, "messages[1].reasoning"),
    ({"messages": answered(reasoning_details=[{"text": "x"}])}, "messages[1].reasoning_details"),
    ({"messages": answered(tool_calls=[CALL | {"extra": 1}])}, "messages[1].tool_calls[0].extra"),
    ({"messages": answered(tool_calls=[CALL, CUSTOM])}, "messages[1].tool_calls[1]"),
    ({"messages": answered(tool_calls=[CHAT_TOOL])}, "messages[1].tool_calls[0].function.parameters"),
    ({"messages": said(TEXT, {"type": "image_url", "image_url": {"url": "x"}})}, "messages[0].content[1]"),
    ({"messages": said(TEXT, TEXT | {"lang": "de"})}, "messages[0].content[1].lang"),
    ({"tools": [CHAT_TOOL | {"defer": True}]}, "tools[0].defer"),
    ({"tools": [tool(returns={})]}, "tools[0].function.returns"),
    ({"response_format": {"type": "json_object", "indent": 2}}, "response_format.indent"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "draft": 7}}},
        "response_format.json_schema.draft",
    ),
    ({"tools": [CHAT_TOOL], "tool_choice": tool(times=2)}, "tool_choice.function.times"),
    (b"{", None),
    (b"[]", None),
    (b'{"messages": "hi"}', "messages"),
    (b'{"messages": []}', "messages"),
    (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0].role"),
    (b'{"messages": [{"role": "user", "content": 7}]}', "messages[0].content"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content[0]"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 9}', "temperature"),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', "n"),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
    (b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}', "stream"),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', None),
    (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "magic"}]}', "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": GET_IT, "tools": []}, "tool_choice"),
    ({"tool_choice": GET_IT, "tools": [OTHER]}, "tool_choice"),
    *(
        ({"tool_choice": choice, "tools": [CHAT_TOOL]}, "tool_choice")
        for choice in ("sometimes", {"type": "function"}, {"type": "custom"})
    ),
    *(({"response_format": {"type": kind}}, "response_format") for kind in ("yaml", "json_schema", None)),
    ({"response_format": {}}, "response_format"),
    *(
        ({"response_format": {"type": "json_schema", "json_schema": schema}}, "response_format")
        for schema in ("x", {"schema": [1]})
    ),
    ({"tools": [tool(name='a"<')], "tool_choice": "required"}, "tools"),
    ({"tools": [tool(parameters=1)], "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "messages[0].content[0]"),
    (b'{"messages": ' + b"[" * 100_000, "messages[0]"),
    ({"messages": said({"type": "text", "text": 7})}, "messages[0].content[0]"),
    ({"seed": 2**63}, "seed"),
]
COMPLETIONS: list[Row] = [
    ({"guided_regex": "(.{0,900}){0,900}"}, "guided_regex"),
    *(({"prompt": prompt}, "prompt") for prompt in (None, "", [], [-1], [10**12], ["x"] * 200)),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 99}, "logprobs"),
    ({"n": 0}, "n"),
    ({"guided_json": "{"}, "guided_json"),
]
RESPONSES: list[Row] = [
    ({"background": True, "stream": True}, "stream"),
    ({"truncation": "middle"}, "truncation"),
    ({"text": {"verbosity": 3}}, "text.verbosity"),
    ({"text": {"size": 7}}, "text.size"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["everything"]}, "include[0]"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    ({"input": [HI | {"mood": "x"}]}, "input[0].mood"),
    (given({"type": "input_text", "text": "x", "n": 1}), "input[0].content[0].n"),
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
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"content": "x"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    *(
        (given(part), "input[0].content[0]")
        for part in (PART, {"type": "input_file", "file_id": "f"}, {"type": "input_text"})
    ),
    ({"input": [{"role": "user", "content": {}}]}, "input[0].content"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
    ({"input": [ITEM_CALL | {"name": None}]}, "input[0].name"),
    ({"input": [ITEM_CALL | {"call_id": 1}]}, "input[0].call_id"),
    ({"input": [ITEM_CALL | {"arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": [PART]}]}, "input[0].output[0]"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": 7}]}, "input[0].id"),
    ({"tools": [{"name": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].name"),
    ({"tools": [TOOL | {"parameters": 7}]}, "tools[0].parameters"),
    ({"instructions": ["x"]}, "instructions"),
    ({"background": True, "store": False}, "store"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"tool_choice": "required"}, "tool_choice"),
    *(
        ({"tool_choice": choice, "tools": [TOOL]}, "tool_choice")
        for choice in ("maybe", {"type": "function", "name": "no"}, {"type": "web_search"})
    ),
    *(({"text": {"format": form}}, "text.format") for form in ("json", {"type": "yaml"})),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"input": [{"type": {}}]}, "input[0].type"),
    ({"input": [{"role": {}, "content": "x"}]}, "input[0].role"),
    (given({"type": [], "text": "x"}), "input[0].content[0]"),
    ({"input": [{"type": "reasoning", "summary": [{"type": {}}]}, {"role": []}]}, "input[0].summary[0]"),
]
MESSAGES: list[Row] = [
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "contents": "hi"}]}, "messages[0].contents"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 9999}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}, "max_tokens": 2048}, "thinking.budget_tokens"),
    ({"thinking": {"type": "loud"}}, "thinking.type"),
    ({"thinking": {"type": "disabled", "tempo": 3}}, "thinking.tempo"),
    ({"output_config": {"effort": "much"}}, "output_config.effort"),
    ({"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
    ({"tools": [{"name": "", "input_schema": SCHEMA}]}, "tools[0].name"),
    ({"messages": [HI | {"mood": "x"}]}, "messages[0].mood"),
    ({"messages": said(TEXT | {"lang": "de"})}, "messages[0].content[0].lang"),
    ({"messages": said(DOCUMENT | {"title": "t"})}, "messages[0].content[0].title"),
    ({"messages": said(DOCUMENT | {"citations": {"enabled": True}})}, "messages[0].content[0].citations"),
    ({"messages": said(DOCUMENT | {"source": {"type": "base64"}})}, "messages[0].content[0].source"),
    ({"messages": said({"type": "search_result", "content": [TEXT]})}, "messages[0].content[0].type"),
    ({"messages": said({"type": "telepathy"})}, "messages[0].content[0].type"),
    ({"messages": said(USE)}, "messages[0].content[0].type"),
    (
        {"messages": said(RESULT | {"content": [TEXT, {"type": "tool_reference"}]})},
        "messages[0].content[0].content[1].tool_name",
    ),
    ({"messages": said({"type": "tool_reference", "tool_name": "get"})}, "messages[0].content[0].type"),
    ({"messages": [HI | {"output_config": {"effort": "much"}}]}, "messages[0].output_config.effort"),
    ({"messages": [HI | {"output_config": "high"}]}, "messages[0].output_config"),
    ({"messages": [HI | {"output_config": {"format": {}}}]}, "messages[0].output_config.format"),
    ({"messages": [{"role": "system", "output_config": {}}]}, "messages[0].content"),
    ({"messages": [HI | {"clear_at": "next_user_message"}]}, "messages[0].clear_at"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
    ({"messages": told(TEXT, USE | {"type": "server_tool_use"})}, "messages[0].content[1].type"),
    ({"messages": told({"type": "web_search_tool_result"})}, "messages[0].content[0].type"),
    ({"messages": told(USE | {"toolset_name": "crm"})}, "messages[0].content[0].toolset_name"),
    ({"system": [TEXT | {"lang": "de"}]}, "system[0].lang"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [MY_TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": [MY_TOOL | {"colour": "red"}]}, "tools[0].colour"),
    ({"tools": [MY_TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [MY_TOOL], "tool_choice": {"type": "any", "times": 2}}, "tool_choice.times"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": said({"type": "image", "source": {}})}, "messages[0].content[0].type"),
    ({"messages": said({"type": "text"})}, "messages[0].content[0].text"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"temperature": 9}, "temperature"),
    ({"system": 4}, "system"),
    *(({"output_config": {"format": form}}, "output_config.format") for form in ("json", {"type": "text"})),
    *(
        ({"messages": begun(content)}, "messages[1]")
        for content in ("I ", [USE], [{"type": "thinking", "thinking": "x"}, TEXT])
    ),
    ({"messages": begun("{"), "output_format": {"type": "json_schema", "schema": SCHEMA}}, "messages"),
    ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role"),
    ({"messages": said({"type": {}, "text": "x"})}, "messages[0].content[0].type"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
]
COUNT: list[Row] = [
    ({"thinking": {"type": "loud"}}, "thinking.type"),
    ({"messages": said({"type": [], "text": "x"}, role="assistant")}, "messages[0].content[0].type"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
]
PARAMETERS: list[Row] = [
    ({"logprobs": 5}, "logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"bad_words": ["no"]}, "bad_words"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ({"extra_args": {"a": 1}}, "extra_args"),
    ({"return_routed_experts": True}, "return_routed_experts"),
    ({"routed_experts_prompt_start": -1}, "routed_experts_prompt_start"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"best_of": 2}, "best_of"),
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_p": 2}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 3}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**70}, "seed"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    *(({"stop_token_ids": ids}, "stop_token_ids") for ids in ([100_000], [-1], [1] * 300)),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"ignore_eos": True}, "ignore_eos"),
    ({"skip_special_tokens": True, "stop": "END"}, "skip_special_tokens"),
    ({"stop": ["x"] * 40}, "stop"),
    ({"stop": 3}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
]
TOKEN_IDS: list[Row] = [
    ({"priority": 1}, "priority"),
    ({"features": {"mm_hashes": {}}}, "features"),
    ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
    ({"stream": True}, "stream"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    *(({"cache_salt": salt}, "cache_salt") for salt in ("", "x" * 300, 5)),
    ({"messages": []}, "messages"),
    ({"prompt": "hi"}, "prompt"),
    *(({"token_ids": ids}, "token_ids") for ids in ([], None, "hi", 5, [5] * 100_000)),
    *(({"token_ids": [each]}, "token_ids") for each in (-1, 100_000, 2**31, 2**63, 10**40)),
    *(({"token_ids": [each]}, "token_ids[0]") for each in ([5], 5.0, True, "5", None)),
    ({"sampling_params": None}, "sampling_params"),
    ({"sampling_params": []}, "sampling_params"),
]
BIASES: list[Any] = [
    {"99999": 1},
    {"-1": 1},
    {"x": 1},
    {"": 1},
    {"٣": 1},
    {"1" * 30: 1},
    {"1": 101},
    {"1": -100.5},
]
FORMATS: list[Any] = [
    {"type": "json_schema", "name": "x"},
    {"type": "json_schema", "name": "x", "schema": {"$ref": "http://elsewhere/schema"}},
    {"type": "json_schema", "name": "x", "schema": {"enum": ["x" * (MAX_BYTES - 20)]}},
]
"""No schema, one that lies elsewhere, and one that is too much with what is around it."""
TRAIN_CLIENT = {"stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False}
"""What the `train` client of verifiers always sends."""
SOUND: dict[str, dict[str, Any]] = {
    "chat": {"messages": [HI]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [HI], "max_tokens": 9},
    "count": {"messages": [HI]},
    "token_ids": {"token_ids": [5, 6, 7], "sampling_params": TRAIN_CLIENT},
}
MORE: dict[str, dict[str, Any]] = {
    "responses": {"max_output_tokens": 3},
    "token_ids": {"token_ids": [3], "cache_salt": "hi", "sampling_params": {}},
}
"""Fields that give a sound body a text and a number to break; other dialects have `max_tokens`."""
CASES = [
    *(("chat", *row) for row in CHAT),
    *(("completions", *row) for row in COMPLETIONS),
    *(("responses", *row) for row in RESPONSES),
    *(("messages", *row) for row in MESSAGES),
    *(("count", *row) for row in COUNT),
    *(
        ("token_ids", {"sampling_params": TRAIN_CLIENT | fields}, f"sampling_params.{param}")
        for fields, param in PARAMETERS
    ),
    *(("token_ids", *row) for row in TOKEN_IDS),
    *((name, {"misspelled": 1}, "misspelled") for name in SOUND),
    *((name, {"metadata": {"a": "x" * 20_000}}, "metadata") for name in SOUND),
    *((name, {"logit_bias": bias}, "logit_bias") for name in ("chat", "completions") for bias in BIASES),
    *(("responses", {"text": {"format": form}}, "text.format") for form in FORMATS),
    *(("messages", {"output_config": {"format": form}}, "output_config.format") for form in FORMATS),
    *(("messages", {"output_format": form}, "output_format") for form in FORMATS),
]


class Read:
    """Reads bodies as the dialects of one gateway do."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._messages = Messages(renderer, "policy", lambda thought: f"signed {thought}")
        self._dialects: dict[str, Dialect] = {
            "chat": Chat(renderer, "policy"),
            "completions": Completions(renderer, "policy"),
            "responses": Responses(renderer, "policy", Redis()),  # these bodies refer to nothing in Redis
            "messages": self._messages,
            "token_ids": TokenIdsDialect(renderer, "policy", router_replay=False),
        }

    async def __call__(self, name: str, body: bytes) -> None:
        if name == "count":
            self._messages.prompt_of(request_of(body))
        else:
            await self._dialects[name].read(Caller("client", "owner"), body, False)

    def shape(self, name: str, error: InvalidRequest) -> Any:
        """The status and the body of the reply."""
        answer = api_error(error)
        return answer.status, json.loads(self._dialects.get(name, self._messages).error(answer))


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return Read(renderer_of(tmp_path_factory.mktemp("models"), "qwen3"))


@pytest.mark.parametrize("name", SOUND)
async def test_a_sound_body_is_read(read: Read, name: str) -> None:
    await read(name, json.dumps(SOUND[name]).encode())


@pytest.mark.parametrize(("name", "fields", "param"), CASES)
async def test_what_is_not_served_is_a_400_that_names_the_field(
    read: Read, name: str, fields: Any, param: str | None
) -> None:
    body = fields if isinstance(fields, bytes) else json.dumps(SOUND[name] | fields).encode()
    with pytest.raises(InvalidRequest) as refused:
        await read(name, body)
    status, told = read.shape(name, refused.value)
    error = told.pop("error")
    assert told == ({"type": "error"} if name in ("messages", "count") else {})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert (param or "") in error["message"]


@pytest.mark.parametrize("name", SOUND)
async def test_what_is_no_body_is_a_400(read: Read, name: str) -> None:
    body = SOUND[name] | MORE.get(name, {"max_tokens": 3})
    sound = json.dumps(body, separators=(",", ":")).encode()
    await read(name, sound)
    for broken, no_body in no_bodies(sound, b'"hi"', b"3").items():
        with pytest.raises(InvalidRequest) as refused:
            await read(name, no_body)
        assert read.shape(name, refused.value)[0] == 400, broken


# Grammars


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


def holding(schema: Any, **more: Any) -> bytes:
    """The body of a call whose answer is held to this schema."""
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True} | more}
    return json.dumps(SOUND["chat"] | {"response_format": form}).encode()


def of_lengths(lengths: Iterable[int], name: str = "maxLength") -> Any:
    """An object of strings, each with another length."""
    return {"type": "object", "properties": {f"f{n}": {"type": "string", name: n} for n in lengths}}


MANY_LENGTHS: Any = of_lengths(range(1000, 1900))
MANY_STATES = "([a-z]{1,60}|x){1,60}"
TOO_COMPLEX = "too complex to compile"
TO_ITSELF = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (nested(40), "levels"),
        (nested(450), "levels"),
        ({"enum": ["x" * 10] * (MAX_BYTES // 10)}, "bytes"),
        ({"$ref": "#"}, "back to itself"),
        ({"allOf": [{"$ref": "#"}]}, "back to itself"),
        ({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": TO_ITSELF}, "back to itself"),
        ({"$ref": "http://elsewhere/schema"}, "elsewhere"),
        ({"anyOf": [{"type": "null"}] * 1000}, "parts"),
        ({"type": "string", "pattern": "(.{0,1000}){0,1000}"}, TOO_COMPLEX),
        ({"patternProperties": {"(a|b|ab)*" * 65: {}}}, TOO_COMPLEX),
        ({"type": "string", "pattern": "a{" + "9" * 5000 + "}"}, TOO_COMPLEX),
        ({"items": [{"pattern": "a?" * 70}]}, TOO_COMPLEX),
        ({"properties": {key: {"pattern": f"{key}{MANY_STATES}"} for key in "abcd"}}, TOO_COMPLEX),
        (of_lengths(range(1000, 1900), "maxLength"), r"maxLength of \$\.properties\.f1\d\d\d"),
        (of_lengths(range(100, 1000), "minLength"), r"minLength of \$\.properties\.f"),
        ({"type": "array", "items": of_lengths(range(1000, 1900))}, r"\$\.items\.properties"),
        ({"anyOf": [{"type": "string", "maxLength": n} for n in range(900)]}, r"\$\.anyOf\["),
        ({"$defs": of_lengths(range(200, 1000))["properties"], "$ref": "#/$defs/f200"}, r"\$\.\$defs\.f"),
        ({"propertyNames": {"maxLength": 99}, "properties": MANY_LENGTHS["properties"]}, "maxLength"),
        ({"type": "string", "pattern": "(.{0,20}){0,99}"}, TOO_COMPLEX),
        ({"patternProperties": {"([a-z]?){999}": {}}}, TOO_COMPLEX),
        ({"properties": {f"f{n}": {} for n in range(300)}, "minProperties": 150}, "number of properties"),
        ({"properties": {"a": {"type": "integer", "multipleOf": 3}}}, "multipleOf"),
        ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, "allOf"),
    ],
)
async def test_a_schema_that_no_engine_could_keep_is_refused(read: Read, schema: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await read("chat", holding(schema))


async def test_the_patterns_of_all_tools_count_together(read: Read) -> None:
    parameters = {"properties": {"a": {"pattern": MANY_STATES}}}
    tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": parameters}} for i in range(4)]
    with pytest.raises(InvalidRequest, match="too complex"):
        await read("chat", json.dumps({"messages": [HI], "tools": tools, "tool_choice": "required"}).encode())


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        ({"properties": {f"n{i}": {"pattern": "^[a-z]{1,64}(-[0-9]{1,32})?$"} for i in range(80)}}, False),
        *(
            ({"pattern": pattern}, False)
            for pattern in (MANY_STATES, r"[)(]{1,9}\({9}", "(((", ")a{2}", "a{2}{3}", "{3}")
        ),
        ({"type": "object", "properties": {"next": {"$ref": "#"}, "not": {"type": "null"}}}, True),
        ({"enum": [{"$ref": "#", "if": 1}]}, True),
        ({"type": "array", "uniqueItems": True}, False),
        ({"type": "string", "pattern": "^[a-z]{2,8}-[0-9]{4}$"}, True),
    ],
)
async def test_a_schema_that_only_looks_like_one_of_those_is_taken(
    read: Read, schema: Any, strict: bool
) -> None:
    await read("chat", holding(schema, strict=strict))


COSTLY: Any = {"type": "string", "pattern": "(.{0,20}){0,99}"}
OF_MANY: Any = {"name": "get", "parameters": of_lengths(range(1000, 1300))}


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        ("chat", {"tools": [tool(**OF_MANY, strict=True)], "tool_choice": "required"}, "tools"),
        (
            "chat",
            {"tools": [tool(**OF_MANY, strict=True)], "response_format": {"type": "json_object"}},
            "tools",
        ),
        ("chat", {"guided_regex": "(.{0,20}){0,99}"}, "guided_regex"),
        ("chat", {"guided_json": COSTLY}, "guided_json"),
        ("completions", {"regex": "([a-z]?){999}"}, "regex"),
        ("completions", {"guided_json": COSTLY}, "guided_json"),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": COSTLY, "strict": True}}},
            "text.format",
        ),
        ("responses", {"tools": [TOOL | OF_MANY | {"strict": True}], "tool_choice": "required"}, "tools"),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": COSTLY}}},
            "output_config.format",
        ),
    ],
)
async def test_a_grammar_that_costs_too_much_is_a_400_at_each_door(
    read: Read, name: str, fields: Any, param: str
) -> None:
    with pytest.raises(InvalidRequest, match=TOO_COMPLEX) as refused:
        await read(name, json.dumps(SOUND[name] | fields).encode())
    assert read.shape(name, refused.value)[1]["error"]["param"] == param
