"""Converts messages, thinking and output format of Anthropic's requests to OpenAI's chat shapes.

What the model cannot read is refused, or left out and named in the turn's record (`left_out`).

Converts tools and tool choice of Anthropic's requests to OpenAI's chat shapes.

Tools that the model does not get are named in the turn's record (`left_out`).
"""

import base64
import hmac
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.dialects.fields import (
    BLOCKS,
    MESSAGE,
    MESSAGE_CONFIG,
    MESSAGES_TOOL,
    OUTPUT_CONFIG,
    SOURCE,
    THINKING,
    check_choice,
    check_fields,
    check_format,
    check_names,
)
from gateway.dialects.image_parts import image_block, is_image, joined
from gateway.dialects.messages_wire import RAW_ARGUMENTS, MessagesRequest, Sign
from gateway.dialects.wire import JsonObject
from gateway.errors import invalid
from gateway.language.chat_messages import Message, Tool, arguments_text
from gateway.language.thinking import ThinkingChoice, effort_of

IN_ANSWER = frozenset({"text", "thinking", "redacted_thinking", "tool_use"})
IN_QUESTION = frozenset({"text", "tool_result", "document"})
IN_TEXT = frozenset({"text", "document"})
IN_RESULT = IN_TEXT | {"tool_reference"}
"""The blocks of an answer, of a user's message, of a system prompt, and of a tool's result."""
LEAST_TOKENS, MOST_TOKENS = 1024, 2**31
"""The smallest and the greatest budget of a thought."""
OMITTED = "omitted"
"""The `display` of a client that wants no text of thoughts. It sends back signatures that carry the text."""


def format_of(request: MessagesRequest) -> tuple[JsonObject | None, str]:
    """The format of the answer's JSON, and the name of the request's field that sets it (`output_format` in
    older betas). Raises InvalidRequest for an unknown type of format."""
    form, param = (request.output_config or {}).get("format"), "output_config.format"
    if form is None:
        form, param = request.output_format, "output_format"
    if form is not None and not (isinstance(form, dict) and form.get("type") == "json_schema"):
        raise invalid(param, "its type is json_schema")
    check_format(form, param)
    return form, param


def thinking_of(request: MessagesRequest) -> tuple[ThinkingChoice, str]:
    """What the request asks of the model's thinking, and the field that asks. Raises InvalidRequest.

    `adaptive` leaves thinking to the model.
    """
    chosen, param = _effort_of(request)
    given = request.thinking
    if given is None:
        return chosen, param
    check_fields(given, THINKING, "thinking")
    kind, budget = given.get("type"), given.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type", "enabled, disabled or adaptive")
    if given.get("display") not in (None, "summarized", OMITTED):
        raise invalid("thinking.display", "summarized or omitted")
    if budget is not None or kind == "enabled":
        _check_budget(budget, request)
    if kind == "adaptive":
        return chosen, param
    if kind == "disabled":
        return ThinkingChoice(False, chosen.effort), "thinking"
    return ThinkingChoice(True, chosen.effort, budget), "thinking"


def _check_budget(budget: Any, request: MessagesRequest) -> None:
    """Raises InvalidRequest for a budget that is none, or is not less than `max_tokens`. With tools, thoughts
    between their calls may have more."""
    param, most = "thinking.budget_tokens", request.max_tokens
    if not (type(budget) is int and LEAST_TOKENS <= budget <= MOST_TOKENS):
        raise invalid(param, f"a number from {LEAST_TOKENS} to {MOST_TOKENS}")
    if most is not None and budget >= most and not request.tools:
        raise invalid(param, f"less than max_tokens, which is {most}")


def _effort_of(request: MessagesRequest) -> tuple[ThinkingChoice, str]:
    """The effort of the call, and the field that names it. A message may change it for the calls that have it
    in their history; the last such message counts."""
    effort, param = None, "output_config.effort"
    if (config := request.output_config) is not None:
        check_fields(config, OUTPUT_CONFIG, "output_config")
        effort = config.get("effort")
    for index, message in enumerate(request.messages):
        if (own := message.get("output_config")) is not None:
            where = f"messages[{index}].output_config"
            if not isinstance(own, dict):
                raise invalid(where, "not an object")
            check_fields(own, MESSAGE_CONFIG, where)
            if own.get("effort") is not None:
                effort, param = own["effort"], f"{where}.effort"
    return effort_of(effort, param), param


def omits_thoughts(request: MessagesRequest) -> bool:
    return (request.thinking or {}).get("display") == OMITTED


def carrying(thought: str, sign: Sign) -> str:
    """The signature of an omitted thought, which carries the thought."""
    return sign(thought) + "." + base64.b64encode(thought.encode(errors="replace")).decode()


def read_thoughts(request: MessagesRequest, sign: Sign) -> None:
    """Put omitted thoughts back into their blocks.

    Raises InvalidRequest that names a thought whose text is not the one that was signed.
    """
    for index, message in enumerate(request.messages):
        content = message.get("content")
        for at, block in enumerate(content if isinstance(content, list) else ()):
            if not (isinstance(block, dict) and block.get("type") == "thinking" and block.get("signature")):
                continue
            thought, signature = block.get("thinking"), block["signature"]
            signature = signature if isinstance(signature, str) else ""
            if thought == "" and "." in signature:
                signature, _, carried = signature.partition(".")
                thought = block["thinking"] = _carried(carried)
            given = signature.encode(errors="replace")
            if not (isinstance(thought, str) and hmac.compare_digest(given, sign(thought).encode())):
                param = f"messages[{index}].content[{at}].signature"
                raise invalid(param, "not the signature of this thought")


def _carried(text: str) -> str | None:
    """The thought that a signature carries; None if it carries none."""
    try:
        return base64.b64decode(text.encode(errors="replace"), validate=True).decode()
    except ValueError:  # not base64, or not UTF-8
        return None


def conversation(request: MessagesRequest, sees: bool = False) -> list[Message]:
    """The messages in OpenAI's shape, in which each tool result is a message of its own. With `sees`, users
    and tools may show images.

    Raises InvalidRequest that names a malformed message, or one that the model cannot read.
    """
    if not request.messages:
        raise invalid("messages", "give at least one")
    messages: list[Message] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{where}.role", f"{role!r} is no role")
        if content is None and role == "assistant":
            content = []  # some clients leave empty fields out
        check_fields(message, MESSAGE, where)
        if content in (None, "", []) and message.get("output_config"):
            continue  # it only sets the effort
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise invalid(f"{where}.content", "neither text nor a list of blocks")
        elif not content and role != "assistant":  # an answer may be empty
            raise invalid(f"{where}.content", "no block")
        elif role == "assistant":
            messages.append(_assistant_message(content, f"{where}.content"))
        else:
            messages += _user_messages(role, content, f"{where}.content", sees and role == "user")
    return messages


def _user_messages(role: str, blocks: list[Any], where: str, sees: bool) -> list[Message]:
    """The messages of a user or system message: first one for each tool result, then one with its text."""
    results: list[Message] = []
    rest: list[tuple[Any, str]] = []
    for at, block in enumerate(blocks):
        place = f"{where}[{at}]"
        if not (sees and is_image(block, "image")) and _kind(block, IN_QUESTION, place) == "tool_result":
            given = _shown(block.get("content") or "", f"{place}.content", sees)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": given})
        else:
            rest.append((block, place))
    if not rest and results:
        return results
    return [*results, {"role": role, "content": joined(_part(*each, sees) for each in rest)}]


def _shown(content: Any, where: str, sees: bool) -> str | list[JsonObject]:
    """What a tool's result shows: its text, or parts if there are images."""
    if not sees or not isinstance(content, list):
        return _text(content, where, IN_RESULT)
    for at, block in enumerate(content):
        if not is_image(block, "image"):
            _kind(block, IN_RESULT, f"{where}[{at}]")
    return joined(_part(block, f"{where}[{at}]", sees) for at, block in enumerate(content))


def _part(block: JsonObject, where: str, sees: bool) -> str | JsonObject:
    return image_block(block, where) if sees and is_image(block, "image") else _text_of(block, where)


def _assistant_message(blocks: list[Any], where: str) -> Message:
    """An earlier answer that the client sends back."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for at, block in enumerate(blocks):
        match _kind(block, IN_ANSWER, f"{where}[{at}]"):
            case "text":
                texts.append(_text_of(block, f"{where}[{at}]"))
            case "thinking":
                thoughts.append(_thought(block, f"{where}[{at}].thinking"))
            case "tool_use":
                calls.append(_call(block, f"{where}[{at}]"))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _thought(block: JsonObject, where: str) -> str:
    thought = block.get("thinking")
    if not isinstance(thought, str | None):
        raise invalid(where, "not text")
    return thought or ""


def _call(block: JsonObject, where: str) -> JsonObject:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str):
        raise invalid(f"{where}.name", "a tool_use without a name")
    raw = given.get(RAW_ARGUMENTS) if isinstance(given, dict) and len(given) == 1 else None
    function = {"name": name, "arguments": raw if isinstance(raw, str) else arguments_text(given)}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _text(content: Any, where: str, kinds: frozenset[str] = IN_TEXT) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "neither text nor a list of blocks")
    for at, block in enumerate(content):
        _kind(block, kinds, f"{where}[{at}]")
    return "".join([_text_of(block, f"{where}[{at}]") for at, block in enumerate(content)])


def _kind(block: Any, kinds: frozenset[str], where: str) -> str:
    """The type of a block, which is one of `kinds`. Raises InvalidRequest for any other, and for a field of
    the block that is not served."""
    if not isinstance(block, dict):
        raise invalid(where, "a block is an object")
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise invalid(f"{where}.type", f"this model does not read {str(kind)[:80]!r} here")
    check_fields(block, BLOCKS[kind], where)
    return kind


def _text_of(block: JsonObject, where: str) -> str:
    """The text of a block of text, of a document whose source is text, or of a reference to a tool."""
    if block["type"] == "tool_reference":
        if not isinstance(block.get("tool_name"), str):
            raise invalid(f"{where}.tool_name", "not a name")
        return f"{block['tool_name']}\n"
    if block["type"] == "text":
        if not isinstance(block.get("text"), str):
            raise invalid(f"{where}.text", "not text")
        return str(block["text"])
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        check_fields(source, SOURCE, f"{where}.source")
        return str(source["data"])
    raise invalid(f"{where}.source", "this model reads text only")


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
        raise invalid("tool_choice", "its type is auto, any, tool or none")
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
            raise invalid(f"{where}.name", "not a name")
        schema = tool.get("input_schema")
        if kind not in (None, "custom") and schema is None:
            raise invalid(f"{where}.type", f"{str(kind)[:80]!r} is not known; give an input_schema")
        if not isinstance(schema, dict):
            raise invalid(f"{where}.input_schema", "not a JSON schema")
        check_fields(tool, MESSAGES_TOOL, where)
        for name in ("strict", "defer_loading"):
            if not isinstance(tool.get(name), bool | None):
                raise invalid(f"{where}.{name}", "neither true nor false")
        names.append((f"{where}.name", tool["name"]))
        if tool["name"] in deferred:
            continue
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        tools.append({"type": "function", "function": function})
    check_names(names)
    if not names:
        raise invalid("tools[0].type", f"this gateway runs no {request.tools[0]['type']!r}; give other tools")
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
