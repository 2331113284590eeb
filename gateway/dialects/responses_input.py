"""Converts items and tools of OpenAI's Responses contract to messages and tools of its chat contract.

What the model cannot read is refused, or left out and named in the turn's record (`left_out`).

reasoning, message, function_call, …  ──▶ one assistant message: the answer that these items came from
function_call_output                  ──▶ a tool's message
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.dialects.fields import (
    ITEMS,
    REFUSAL_PART,
    RESPONSES_TOOL,
    TEXT_PART,
    check_fields,
    check_names,
    note_unknown,
)
from gateway.dialects.image_parts import input_image, is_image, joined
from gateway.dialects.responses_wire import Item
from gateway.dialects.wire import TEXT_PARTS, JsonObject
from gateway.errors import invalid
from gateway.language.chat_messages import Message, Tool, text_of
from gateway.language.image_pads import has_image

ROLES = ("system", "developer", "user", "assistant")
REASONING_PARTS = ("reasoning_text", "summary_text")
HOSTED = frozenset(
    {
        *("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11"),
        *("file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
        "programmatic_tool_calling",
    }
)
"""Tools that OpenAI's servers run. Some harnesses offer them with every call."""
UNSERVED = frozenset({"custom", "namespace"})
"""Tools in other forms than a function; Codex offers them for some models' names."""


def messages_of(items: Sequence[Item], sees: bool = False) -> list[Message]:
    """Items in OpenAI's chat shape. With `sees`, users and tools may show images. Raises InvalidRequest that
    names a malformed item."""
    messages: list[Message] = []
    answer: Message | None = None
    """The assistant message to which the next items are added."""
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", kind_of(item)
        if isinstance(kind, str) and kind in ITEMS:
            check_fields(item, ITEMS[kind], where)
        match kind:
            case "message" if item.get("role") == "assistant":
                if answer is None or "content" in answer:
                    messages.append(answer := {"role": "assistant"})
                content = item.get("content")  # some clients leave empty fields out
                answer["content"] = "" if content is None else _text(content, f"{where}.content")
            case "reasoning":
                if not (reasoning := _reasoning(item, where)):
                    continue  # the client left the text out, or has it encrypted only
                if answer is None or "content" in answer or "tool_calls" in answer:
                    messages.append(answer := {"role": "assistant"})
                answer["reasoning_content"] = answer.get("reasoning_content", "") + reasoning
            case "function_call":
                if answer is None:
                    messages.append(answer := {"role": "assistant"})
                answer.setdefault("tool_calls", []).append(_call(item, where))
            case "function_call_output":
                answer = None
                messages.append(_result(item, where, sees))
            case "message":
                answer = None
                messages.append(_message(item, where, sees))
            case _:
                raise invalid(f"{where}.type", f"this gateway reads no item of type {kind!r}")
    for message in messages:
        message.setdefault("content", "")
    return messages


def items_of(messages: Sequence[Message], name: str) -> list[Item]:
    """The items of messages that `messages_of` made; their ids begin with `name`, that of the response."""
    items: list[Item] = []

    def add(prefix: str, kind: str, **fields: Any) -> None:
        made = {"id": f"{prefix}_{name}_in{len(items)}", "type": kind, "status": "completed", **fields}
        items.append(made)

    for message in messages:
        given = message.get("content") or ""
        text = text_of(given)
        if message["role"] == "tool":
            output = _input_parts(given) if has_image(given) else text
            add("fco", "function_call_output", call_id=message.get("tool_call_id"), output=output)
            continue
        if message["role"] != "assistant":
            parts = _input_parts(given if has_image(given) else text)
            add("msg", "message", role=message["role"], content=parts)
            continue
        if reasoning := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            add("rs", "reasoning", summary=[], content=content)
        if text or not message.get("tool_calls"):
            content = [{"type": "output_text", "text": text, "annotations": []}]
            add("msg", "message", role="assistant", content=content)
        for call in message.get("tool_calls") or ():
            add("fc", "function_call", call_id=call["id"], **call["function"])
    return items


def _input_parts(content: str | list[JsonObject]) -> list[JsonObject]:
    """The content as parts of an item. An image is named by its hash; its bytes are not repeated."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return [
        {"type": "input_image", "detail": "auto", "image_url": None, "file_id": part["sha256"]}
        if has_image([part])
        else {"type": "input_text", "text": text_of([part])}
        for part in content
    ]


def kind_of(item: Mapping[str, Any]) -> Any:
    """The type of an item; a message or a reference may lack its type field."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference" if "id" in item else None
    return kind


def functions_of(tools: Sequence[Tool] | None) -> list[Tool] | None:
    """The functions among the tools, in OpenAI's chat shape.

    Tools in `HOSTED` and `UNSERVED` are left out if there are functions. Raises InvalidRequest that names a
    malformed tool, one of another type, or one that is left out where there is no function.
    """
    functions: list[Tool] = []
    names: list[tuple[str, str]] = []
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise invalid(f"{where}.type", "a tool says its type")
        if kind in HOSTED or kind in UNSERVED:
            continue
        if kind != "function":
            raise invalid(f"{where}.type", f"this gateway serves functions, not {kind[:80]!r}")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise invalid(f"{where}.name", "a function says its name, beside its type")
        if not isinstance(tool.get("parameters"), dict | None):
            raise invalid(f"{where}.parameters", "the parameters of a function are a JSON schema")
        check_fields(tool, RESPONSES_TOOL, where)
        names.append((f"{where}.name", tool["name"]))
        fields = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in fields if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    check_names(names)
    if tools and not functions:
        raise invalid("tools[0].type", f"this gateway runs no {tools[0]['type']!r}; give functions")
    return functions or None


def left_out_of(tools: Sequence[Tool] | None, items: Sequence[Item]) -> list[str]:
    """What `functions_of` and `messages_of` leave out: types of tools, and `reasoning` without its text."""
    kinds = {str(tool.get("type")) for tool in tools or () if tool.get("type") != "function"}
    reasoning = ((at, item) for at, item in enumerate(items) if kind_of(item) == "reasoning")
    if any(not _reasoning(item, f"input[{at}]") for at, item in reasoning):
        kinds.add("reasoning")
    return sorted(kinds)


def _message(item: Item, where: str, sees: bool) -> Message:
    role = item.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"{role!r} is no role")
    content = _shown(item.get("content"), f"{where}.content", sees and role == "user")
    return {"role": role, "content": content}


def _call(item: Item, where: str) -> Message:
    call_id, name, arguments = item.get("call_id"), item.get("name"), item.get("arguments")
    if not isinstance(name, str):
        raise invalid(f"{where}.name", "a function call says the function's name")
    if not isinstance(call_id, str):
        raise invalid(f"{where}.call_id", "a function call has a call_id")
    if not isinstance(arguments, str):
        raise invalid(f"{where}.arguments", "the arguments of a function call are text")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(item: Item, where: str, sees: bool) -> Message:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise invalid(f"{where}.call_id", "the output of a function call names the call")
    output = _shown(item.get("output"), f"{where}.output", sees)
    return {"role": "tool", "tool_call_id": call_id, "content": output}


def _shown(content: Any, where: str, sees: bool) -> str | list[JsonObject]:
    """The text, or parts of a chat message if there are images."""
    if not sees or not isinstance(content, list):
        return _text(content, where)
    return joined(
        input_image(part, f"{where}[{at}]")
        if is_image(part, "input_image")
        else _part(part, f"{where}[{at}]")
        for at, part in enumerate(content)
    )


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "neither text nor a list of parts")
    return "".join([_part(part, f"{where}[{index}]") for index, part in enumerate(content)])


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise invalid(where, "a part is an object")
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise invalid(where, f"this model reads text here, not {kind}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(where, "the text of a part is not text")
    check_fields(part, REFUSAL_PART if kind == "refusal" else TEXT_PART, where)
    return text


def _reasoning(item: Item, where: str) -> str:
    """The reasoning of an earlier answer: its content, or its summary where the content is missing."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if not isinstance(parts, list | None):
            raise invalid(f"{where}.{name}", "not a list of parts")
        texts = [_thought(part, f"{where}.{name}[{at}]") for at, part in enumerate(parts or ())]
        if text := "\n".join(filter(None, texts)):
            return text
    return ""


def _thought(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in REASONING_PARTS:
        note_unknown(where)
        return ""
    check_fields(part, TEXT_PART, where)
    text = part.get("text")
    return text if isinstance(text, str) else ""
