"""`/v1/messages`: Anthropic's wire shape to calls and back, plain and streaming, and `count_tokens`."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.collaborators import Collaborators
from gateway.dialects.base import Ask
from gateway.dialects.messages_wire import RAW_ARGUMENTS, MessagesTelling
from gateway.dialects.wire import check_sampling, decode_body, stops, wished
from gateway.edge.reply import Reply
from gateway.edge.request import Arrival
from gateway.generations.generation import Call
from gateway.language.constraint import constraint_of
from gateway.language.render import Message, Tool, arguments_text
from gateway.sessions.identity import Caller
from gateway.sessions.user_names import user_in_metadata
from rollout_queue.http.errors import ApiError

Block = dict[str, Any]

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "max_tokens")
UNREADABLE = ("image", "document", "file", "container_upload")
"""Blocks that only a model with eyes can read."""


class MessagesRequest(msgspec.Struct):
    """The fields of Anthropic's contract that change what is done; others are tolerated."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    return_token_ids: bool | None = False


class NoThreads(ApiError):
    """Tells Anthropic's SDK, in the words that it knows, to send whole histories."""

    def __init__(self) -> None:
        super().__init__(400, "thread: this gateway keeps no threads; send all messages", param="thread")

    @property
    def body(self) -> dict[str, Any]:
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"error": {**super().body["error"], "details": details}}


class Messages:
    """The dialect of `/v1/messages`."""

    prefix = "msg_"

    async def read(self, gateway: Collaborators, caller: Caller, arrival: Arrival) -> Ask:
        body = request_of(arrival)
        if body.max_tokens is None:
            raise ApiError(400, "max_tokens: give how long the answer may be", param="max_tokens")
        check_sampling(body)
        tools, choice = tools_of(body), choice_of(body.tool_choice)
        form, param = format_of(body)
        single = bool((body.tool_choice or {}).get("disable_parallel_tool_use"))
        constraint = constraint_of(
            gateway.renderer, tools, choice, form, parallel_tool_calls=not single, format_param=param
        )
        call = Call(
            messages=conversation(body),
            tools=None if choice == "none" else tools,
            asked=wished(body, SAMPLING_FIELDS) | constraint.asked,
            stop=stops(body.stop_sequences),
            stream=bool(body.stream),
            constraint=constraint.parameters,
            user=user_in_metadata(body.metadata or {}),
        )
        model = body.model or gateway.settings.model_name
        return Ask(
            calls=[call],
            telling=MessagesTelling(model, bool(body.return_token_ids)),
            stream=bool(body.stream),
            model=body.model,
            metadata=body.metadata,
        )

    def error(self, error: ApiError) -> bytes:
        return msgspec.json.encode({"type": "error", **error.body})


class CountTokens:
    """`/v1/messages/count_tokens`: how long the prompt of a request is."""

    async def serve(self, gateway: Collaborators, arrival: Arrival, reply: Reply) -> None:
        gateway.identities.caller(arrival.headers)
        body = request_of(arrival)
        ids = await asyncio.to_thread(gateway.generator.prompt_ids, conversation(body), tools_of(body))
        await reply.whole(200, msgspec.json.encode({"input_tokens": len(ids)}), {})

    def error(self, error: ApiError) -> bytes:
        return Messages().error(error)


def request_of(arrival: Arrival) -> MessagesRequest:
    """Raises ApiError 400 for what is no request, or says a part of the conversation only."""
    body = decode_body(arrival.body, MessagesRequest)
    if body.thread is not None:
        raise NoThreads
    return body


def format_of(body: MessagesRequest) -> tuple[dict[str, Any] | None, str]:
    """What the answer's JSON is held to, and in which field: `output_format` in older betas.

    Raises ApiError 400 for what is no format.
    """
    form, param = (body.output_config or {}).get("format"), "output_config.format"
    if form is None:
        form, param = body.output_format, "output_format"
    if form is not None and not (isinstance(form, dict) and form.get("type") == "json_schema"):
        raise ApiError(400, f"{param}: its type is json_schema", param=param)
    return form, param


def choice_of(tool_choice: Mapping[str, Any] | None) -> str | dict[str, Any]:
    """Anthropic's choice in the inner shape. Raises ApiError 400 for what is none."""
    kind = "auto" if tool_choice is None else tool_choice.get("type")
    if kind == "tool" and tool_choice is not None:
        return {"type": "function", "name": tool_choice.get("name")}
    if kind not in ("auto", "any", "none"):
        raise ApiError(400, "tool_choice: its type is auto, any, tool or none", param="tool_choice")
    return "required" if kind == "any" else str(kind)


def tools_of(body: MessagesRequest) -> list[Tool] | None:
    """The tools that the agent runs, in the inner shape; those that Anthropic's servers run are left out."""
    tools: list[Tool] = []
    for index, tool in enumerate(body.tools or ()):
        if not isinstance(tool.get("name"), str):
            raise ApiError(400, f"tools[{index}].name: not a name", param=f"tools[{index}].name")
        schema = tool.get("input_schema")
        if tool.get("type") not in (None, "custom") and schema is None:
            continue
        if not isinstance(schema, dict):
            where = f"tools[{index}].input_schema"
            raise ApiError(400, f"{where}: not a JSON schema", param=where)
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
        tools.append({"type": "function", "function": function})
    return tools or None


def conversation(body: MessagesRequest) -> list[Message]:
    """The messages in the inner shape: results of tools are messages of their own.

    Raises ApiError 400 that names what is no message, or what a text model cannot read.
    """
    if not body.messages:
        raise ApiError(400, "messages: give at least one", param="messages")
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ApiError(400, f"{where}.role: {role!r} is no role", param=f"{where}.role")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not (isinstance(content, list) and all(isinstance(block, dict) for block in content)):
            raise ApiError(400, f"{where}.content: neither text nor a list of blocks", param=where)
        elif role == "assistant":
            messages.append(_answer(content, where))
        else:
            messages += _said(role, content, where)
    return messages


def _said(role: str, blocks: list[Block], where: str) -> list[Message]:
    """What the user's side said: first what its tools gave back, then its text."""
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


def _answer(blocks: list[Block], where: str) -> Message:
    """An earlier answer, as the client kept it."""
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


def _call(block: Block, where: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str):
        raise ApiError(400, f"{where}.content: a tool_use without a name", param=where)
    raw = given.get(RAW_ARGUMENTS) if isinstance(given, dict) and len(given) == 1 else None
    function = {"name": name, "arguments": raw if isinstance(raw, str) else arguments_text(given)}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content: neither text nor a list of blocks", param=where)
    return "".join(_text_of(block, where) for block in content)


def _text_of(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in UNREADABLE:
        source = block.get("source")
        if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
            return str(source["data"])
        raise ApiError(400, f"{where}.content: this model reads text, not {kind}", param=where)
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind is None or kind == "text":
        raise ApiError(400, f"{where}.content: a block without text", param=where)
    return ""  # what Anthropic's own servers left in the history: search results, code of theirs
