"""Converts tools and tool choice of Anthropic's requests to OpenAI's chat shapes.

Tools that the model does not get are named in the turn's record (`left_out`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.dialects.fields.checks import check_fields, check_names
from gateway.dialects.fields.tables import MESSAGES_TOOL, check_choice
from gateway.dialects.messages_wire import MessagesRequest
from gateway.dialects.wire import JsonObject
from gateway.errors import InvalidRequest
from gateway.language.chat_messages import Tool

HOSTED = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_(?:bm25|regex)|advisor)(?:_\d{8})?"
)
"""The types of tools that Anthropic's servers run, with their dates."""


def choice_of(tool_choice: Mapping[str, Any] | None) -> str | JsonObject:
    """Anthropic's `tool_choice` in OpenAI's shape. Raises InvalidRequest for an unknown type."""
    check_choice(tool_choice)
    kind = "auto" if tool_choice is None else tool_choice.get("type")
    if kind == "tool" and tool_choice is not None:
        return {"type": "function", "name": tool_choice.get("name")}
    if kind not in ("auto", "any", "none"):
        raise InvalidRequest("tool_choice: its type is auto, any, tool or none", param="tool_choice")
    return "required" if kind == "any" else str(kind)


def tools_of(request: MessagesRequest) -> list[Tool] | None:
    """The tools that the agent runs, in OpenAI's shape.

    Tools that Anthropic's servers run are left out if there are others, and tools whose loading is deferred
    until a tool's result refers to them. Raises InvalidRequest that names a malformed tool, one of another
    type, a name that occurs twice, or a server's tool where there is no other.
    """
    if not request.tools:
        return None
    tools: list[Tool] = []
    deferred = _deferred(request)
    names: list[tuple[str, str]] = []
    for index, tool in enumerate(request.tools):
        where, kind = f"tools[{index}]", tool.get("type")
        if _hosted(tool) is not None:
            continue
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise _invalid(f"{where}.name", "not a name")
        schema = tool.get("input_schema")
        if kind not in (None, "custom") and schema is None:
            raise _invalid(f"{where}.type", f"{str(kind)[:80]!r} is not known; give an input_schema")
        if not isinstance(schema, dict):
            raise _invalid(f"{where}.input_schema", "not a JSON schema")
        check_fields(tool, MESSAGES_TOOL, where)
        for name in ("strict", "defer_loading"):
            if not isinstance(tool.get(name), bool | None):
                raise _invalid(f"{where}.{name}", "neither true nor false")
        names.append((f"{where}.name", tool["name"]))
        if tool["name"] in deferred:
            continue
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        tools.append({"type": "function", "function": function})
    check_names(names)
    if not names:
        raise _invalid(
            "tools[0].type", f"this gateway runs no {request.tools[0]['type']!r}; give other tools"
        )
    return tools or None


def left_out_of(request: MessagesRequest) -> list[str]:
    """What `tools_of` and `conversation` leave out: types of tools, deferred tools, and thoughts that are not
    readable."""
    kinds = {hosted for tool in request.tools or () if (hosted := _hosted(tool)) is not None}
    if _deferred(request):
        kinds.add("defer_loading")
    blocks = (block for message in request.messages for block in _blocks(message))
    if any(block.get("type") == "redacted_thinking" for block in blocks):
        kinds.add("redacted_thinking")
    return sorted(kinds)


def _deferred(request: MessagesRequest) -> frozenset[str]:
    """The names of the tools that are not in the prompt yet: the agent's own search has not found them.

    If the request leaves the search to Anthropic's servers, nobody could find them here, so none is deferred.
    """
    if not (tools := request.tools):
        return frozenset()
    waiting = {str(tool.get("name")) for tool in tools if tool.get("defer_loading") is True}
    if not waiting or any((_hosted(tool) or "").startswith("tool_search") for tool in tools):
        return frozenset()
    return frozenset(waiting - set(_referred(request)))


def _referred(request: MessagesRequest) -> Iterator[str]:
    """The names of the tools to which results in the history refer."""
    for message in request.messages:
        for block in _blocks(message):
            if block.get("type") == "tool_result":
                for part in _blocks(block):
                    if part.get("type") == "tool_reference":
                        yield str(part.get("tool_name"))


def _blocks(holder: JsonObject) -> Iterator[JsonObject]:
    content = holder.get("content")
    return (each for each in (content if isinstance(content, list) else ()) if isinstance(each, dict))


def _hosted(tool: JsonObject) -> str | None:
    """The type of a tool that Anthropic's servers run, without its date; None for another tool."""
    kind = tool.get("type")
    found = HOSTED.fullmatch(kind) if isinstance(kind, str) and "input_schema" not in tool else None
    return None if found is None else found[1]


def _invalid(where: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {message}", param=where)
