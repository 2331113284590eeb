"""Converts messages, tools, tool choice and output format of Anthropic's requests to OpenAI's chat shapes."""

import hmac
from collections.abc import Mapping
from typing import Any

from gateway.dialects.fields import check_keys
from gateway.dialects.messages_wire import RAW_ARGUMENTS, MessagesRequest, Sign
from gateway.dialects.wire import JsonObject
from gateway.errors import InvalidRequest
from gateway.language.chat_messages import Message, Tool
from gateway.language.render import arguments_text
from gateway.language.thinking import ThinkingWish, effort_of

NOT_TEXT = ("image", "document", "file", "container_upload")
"""Kinds of blocks that a text model can read only if their source is text."""


def format_of(request: MessagesRequest) -> tuple[JsonObject | None, str]:
    """The format of the answer's JSON, and the name of the request's field that sets it (`output_format` in
    older betas). Raises InvalidRequest for an unknown type of format."""
    form, param = (request.output_config or {}).get("format"), "output_config.format"
    if form is None:
        form, param = request.output_format, "output_format"
    if form is not None and not (isinstance(form, dict) and form.get("type") == "json_schema"):
        raise InvalidRequest(f"{param}: its type is json_schema", param=param)
    return form, param


def thinking_of(request: MessagesRequest) -> tuple[ThinkingWish, str]:
    """What the request asks of the model's thinking, and the field that asks. Raises InvalidRequest.

    `adaptive` leaves thinking to the model. The effort `high` is Anthropic's default, and asks for nothing.
    """
    config, param = request.output_config or {}, "output_config.effort"
    check_keys(config, ("format", "effort"), "output_config")
    effort = config.get("effort")
    wish = ThinkingWish() if effort in (None, "high") else effort_of(effort, param)
    given = request.thinking
    if given is None:
        return wish, param
    check_keys(given, ("type", "budget_tokens", "display"), "thinking")
    kind, budget = given.get("type"), given.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidRequest("thinking.type: enabled, disabled or adaptive", param="thinking.type")
    if given.get("display") not in (None, "summarized"):
        raise InvalidRequest("thinking.display: thoughts are shown whole", param="thinking.display")
    if not (isinstance(budget, int) and budget > 0) and (budget is not None or kind == "enabled"):
        raise InvalidRequest("thinking.budget_tokens: a number above 0", param="thinking.budget_tokens")
    if kind == "adaptive":
        return wish, param
    if kind == "disabled":
        return ThinkingWish(on=False), "thinking"
    return ThinkingWish(True, wish.effort, budget), "thinking"


def choice_of(tool_choice: Mapping[str, Any] | None) -> str | JsonObject:
    """Anthropic's `tool_choice` in OpenAI's shape. Raises InvalidRequest for an unknown type."""
    kind = "auto" if tool_choice is None else tool_choice.get("type")
    if kind == "tool" and tool_choice is not None:
        return {"type": "function", "name": tool_choice.get("name")}
    if kind not in ("auto", "any", "none"):
        raise InvalidRequest("tool_choice: its type is auto, any, tool or none", param="tool_choice")
    return "required" if kind == "any" else str(kind)


def tools_of(request: MessagesRequest) -> list[Tool] | None:
    """The tools that the agent runs, in OpenAI's shape. Tools that Anthropic's servers run are left out.

    Raises InvalidRequest that names a malformed tool.
    """
    tools: list[Tool] = []
    for index, tool in enumerate(request.tools or ()):
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise InvalidRequest(f"tools[{index}].name: not a name", param=f"tools[{index}].name")
        schema = tool.get("input_schema")
        if tool.get("type") not in (None, "custom") and schema is None:
            continue
        if not isinstance(schema, dict):
            where = f"tools[{index}].input_schema"
            raise InvalidRequest(f"{where}: not a JSON schema", param=where)
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
        tools.append({"type": "function", "function": function})
    return tools or None


def check_thoughts(request: MessagesRequest, sign: Sign) -> None:
    """Raises InvalidRequest that names a signed thought which is not as the model had it."""
    for index, message in enumerate(request.messages):
        content = message.get("content")
        for at, block in enumerate(content if isinstance(content, list) else ()):
            if not (isinstance(block, dict) and block.get("type") == "thinking" and block.get("signature")):
                continue
            thought, signature = block.get("thinking"), block["signature"]
            given = signature.encode() if isinstance(signature, str) else b""
            if not (isinstance(thought, str) and hmac.compare_digest(given, sign(thought).encode())):
                param = f"messages[{index}].content[{at}].signature"
                raise InvalidRequest(f"{param}: not the signature of this thought", param=param)


def conversation(request: MessagesRequest) -> list[Message]:
    """The messages in OpenAI's shape, in which each tool result is a message of its own.

    Raises InvalidRequest that names a malformed message, or one that a text model cannot read.
    """
    if not request.messages:
        raise InvalidRequest("messages: give at least one", param="messages")
    messages: list[Message] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{where}.role: {role!r} is no role", param=f"{where}.role")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not (isinstance(content, list) and all(isinstance(block, dict) for block in content)):
            raise InvalidRequest(f"{where}.content: neither text nor a list of blocks", param=where)
        elif not content:
            raise InvalidRequest(f"{where}.content: no block", param=f"{where}.content")
        elif role == "assistant":
            messages.append(_assistant_message(content, where))
        else:
            messages += _user_messages(role, content, where)
    return messages


def _user_messages(role: str, blocks: list[JsonObject], where: str) -> list[Message]:
    """The messages of a user or system message: first one for each tool result, then one with its text."""
    results, text = [], []
    for block in blocks:
        if block.get("type") in ("tool_result", "mcp_tool_result"):
            given = _text(block.get("content") or "", where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": given})
        else:
            text.append(block)
    if not text and results:
        return results
    return [*results, {"role": role, "content": _text(text, where)}]


def _assistant_message(blocks: list[JsonObject], where: str) -> Message:
    """An earlier answer that the client sends back."""
    thoughts = [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]
    calls = [_call(block, where) for block in blocks if block.get("type") == "tool_use"]
    text = [
        block for block in blocks if block.get("type") not in ("thinking", "redacted_thinking", "tool_use")
    ]
    message: Message = {"role": "assistant", "content": _text(text, where)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: JsonObject, where: str) -> JsonObject:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str):
        raise InvalidRequest(f"{where}.content: a tool_use without a name", param=where)
    raw = given.get(RAW_ARGUMENTS) if isinstance(given, dict) and len(given) == 1 else None
    function = {"name": name, "arguments": raw if isinstance(raw, str) else arguments_text(given)}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _text(content: str | list[JsonObject], where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content: neither text nor a list of blocks", param=where)
    return "".join(_text_of(block, where) for block in content)


def _text_of(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in NOT_TEXT:
        source = block.get("source")
        if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
            return str(source["data"])
        raise InvalidRequest(f"{where}.content: this model reads text, not {kind}", param=where)
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind is None or kind == "text":
        raise InvalidRequest(f"{where}.content: a block without text", param=where)
    return ""  # the result of a tool that Anthropic's own servers ran, such as web search
