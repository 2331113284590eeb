"""`/v1/chat/completions`: reads OpenAI's chat requests, refuses what is not served, and writes the answers,
whole or as a stream."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from gateway.callers.identity import Caller, user_named
from gateway.dialects.base import ParsedRequest, RecordedAnswer
from gateway.dialects.body_decoding import decode_body
from gateway.dialects.chat_wire import (
    ChatChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    ChunkEnvelope,
    ChunkFields,
    FunctionCall,
    finish_of,
    message_of,
    tool_call_of,
)
from gateway.dialects.fields import (
    CALLED,
    CHAT,
    CHAT_CALL,
    CHAT_MESSAGES,
    CHAT_TOOL,
    FUNCTION,
    NAMED,
    REFUSAL_PART,
    TEXT_PART,
    check_choice,
    check_fields,
    check_format,
    check_metadata,
    check_names,
    refuse_unserved,
    verbosity_of,
)
from gateway.dialects.image_parts import SHOWN, chat_image, is_image
from gateway.dialects.logprobs import logprobs_of
from gateway.dialects.wire import (
    HEARTBEAT,
    TEXT_PARTS,
    JsonObject,
    check_sampling,
    encode,
    event,
    guided_form,
    refuse_constrained,
    sampling_of,
    split_begun,
    stop_strings,
    usage_of,
)
from gateway.errors import InvalidRequest, invalid
from gateway.generations.generation import Call, Generation
from gateway.language.call_syntax import SYNTAX_OF_FAMILY
from gateway.language.chat_messages import Message, Tool, in_call_order
from gateway.language.constraint import AnswerForm, constraint_of, shown_tools
from gateway.language.deltas import Delta
from gateway.language.families import Family
from gateway.language.parsed_answer import ToolCall
from gateway.language.render import ChatRenderer
from gateway.language.thinking import SWITCHES, ThinkingChoice, effort_of
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import worked

OLDER = frozenset({"refusal", "function_call"})
"""Fields that `_modern` converts to other fields."""
PLAIN = frozenset({"role", "content"})
TEXTS = frozenset({"name", "tool_call_id", "reasoning_content", "reasoning", "refusal"})
"""Fields of a message that are text, or null."""


def conversation(messages: Sequence[Message], sees: bool = False) -> list[Message]:
    """The messages as the template reads them; with `sees`, the model reads images. Raises InvalidRequest
    that names a malformed field."""
    check_messages(messages, sees)
    if sees:
        messages = [_with_images(each, f"messages[{index}]") for index, each in enumerate(messages)]
    return in_call_order([each if each.keys().isdisjoint(OLDER) else _modern(each) for each in messages])


def begun_of(request: ChatRequest, messages: list[Message]) -> tuple[list[Message], str]:
    """The messages, and the text with which the answer begins. Raises InvalidRequest for a contradiction."""
    continues, param = bool(request.continue_final_message), "continue_final_message"
    if request.add_generation_prompt is not None and request.add_generation_prompt is continues:
        raise invalid("add_generation_prompt", f"contradicts {param}")
    if not continues:
        return messages, ""
    if messages[-1]["role"] != "assistant":
        raise invalid(param, "the last message is not the assistant's")
    return split_begun(messages, param)


class ChatTools(NamedTuple):
    """The tools of a request as the template reads them, and how they may be called."""

    tools: list[Tool] | None
    choice: str | JsonObject | None
    parallel: bool | None


def tools_of(request: ChatRequest, family: Family) -> ChatTools:
    """The tools of the request, in either form. Raises InvalidRequest that names a malformed field, also of
    `tool_choice` and `response_format`."""
    if request.functions or request.function_call is not None:
        return _functions_of(request, family)
    check_choice(request.tool_choice)
    check_format(request.response_format, "response_format")
    tools = request.tools
    if tools:
        check_tools(tools)
        tools = [_tool(tool["function"]) for tool in tools]
    return ChatTools(tools, request.tool_choice, request.parallel_tool_calls)


def _functions_of(request: ChatRequest, family: Family) -> ChatTools:
    """The functions of the request as tools of which an answer calls at most one."""
    functions, choice = request.functions or [], request.function_call
    if not functions:
        raise invalid("function_call", "there are no functions to choose from")
    for name in ("tools", "tool_choice"):
        if getattr(request, name):
            raise invalid(name, "functions are given already")
    if family.syntax not in SYNTAX_OF_FAMILY or family.call_ids or family.text_calls:
        raise invalid("functions", f"use tools: {family.name} cannot be held to one call without an id")
    for index, function in enumerate(functions):
        check_function(function, f"functions[{index}]")
    check_names((f"functions[{index}].name", each["name"]) for index, each in enumerate(functions))
    if isinstance(choice, dict):
        check_fields(choice, NAMED, "function_call")
        if choice.get("name") not in [function["name"] for function in functions]:
            raise invalid("function_call", "there is no function of this name")
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "auto", "none"):
        raise invalid("function_call", "auto, none, or a function by its name")
    return ChatTools([_tool(function) for function in functions], choice, False)


def _tool(function: Tool) -> Tool:
    """The tool as the template reads it, without fields that are not known."""
    if not function.keys() <= FUNCTION.accepted:
        function = {name: value for name, value in function.items() if name in FUNCTION.accepted}
    return {"type": "function", "function": function}


def form_of(request: ChatRequest) -> tuple[JsonObject | AnswerForm | None, str]:
    """What the answer's text must be, and the field that says so. Raises InvalidRequest if two do."""
    form, param = guided_form(request)
    if form is None:
        return request.response_format, "response_format"
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise invalid(param, "response_format is given already")
    return form, param


def check_messages(messages: Sequence[Message], sees: bool = False) -> None:
    """Raises InvalidRequest for an empty list, and for a message that is malformed, or not text. With `sees`,
    users and tools may show images."""
    if not messages:
        raise invalid("messages", "give at least one")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        known = isinstance(role, str) and role in CHAT_MESSAGES
        if known and isinstance(content, str) and message.keys() <= PLAIN:
            continue
        where = f"messages[{index}]"
        if not (isinstance(role, str) and known):
            raise invalid(f"{where}.role", f"{role!r} is no role")
        if isinstance(content, list):
            for at, part in enumerate(content):
                _check_part(part, f"{where}.content[{at}]", sees and role in SHOWN)
        elif not (content is None or isinstance(content, str)):
            raise invalid(f"{where}.content", "neither text nor a list of parts")
        check_fields(message, CHAT_MESSAGES[role], where)
        if role != "assistant" and content in (None, []):  # some clients leave empty fields of answers out
            raise invalid(f"{where}.content", "missing")
        for name in TEXTS & message.keys():
            if not isinstance(message[name], str | None):
                raise invalid(f"{where}.{name}", "not text")
        if (calls := message.get("tool_calls")) is not None:
            _check_calls(calls, f"{where}.tool_calls")
        if (call := message.get("function_call")) is not None:
            if not isinstance(call, dict) or calls:
                raise invalid(f"{where}.function_call", "not a call, or beside tool_calls")
            check_fields(call, CALLED, f"{where}.function_call")


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest for a tool that is not a function with a name."""
    for index, tool in enumerate(tools):
        function, where = tool.get("function"), f"tools[{index}].function"
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise invalid("tools", "each is a function")
        check_function(function, where)
        check_fields(tool, CHAT_TOOL, f"tools[{index}]")
    check_names(
        (f"tools[{index}].function.name", tool["function"]["name"]) for index, tool in enumerate(tools)
    )


def check_function(function: Tool, where: str) -> None:
    """Raises InvalidRequest for a malformed definition of a function."""
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where}.name", "not a name")
    if not isinstance(function.get("description"), str | None):
        raise invalid(f"{where}.description", "not text")
    if not isinstance(function.get("parameters"), dict | None):
        raise invalid(f"{where}.parameters", "not a JSON schema")
    check_fields(function, FUNCTION, where)


def thinking_of(request: ChatRequest) -> tuple[ThinkingChoice, str]:
    """What the request asks of the model's thinking, and the field that asks. Raises InvalidRequest."""
    kwargs, param = request.chat_template_kwargs, "chat_template_kwargs"
    if kwargs is None:
        return effort_of(request.reasoning_effort, "reasoning_effort"), "reasoning_effort"
    for name, value in kwargs.items():  # each may change the prompt, so none is ignored
        if name not in (*SWITCHES, "reasoning_effort") and value is not None:
            raise invalid(f"{param}.{name}", "this gateway hands no other options to the chat template")
    effort = request.reasoning_effort or kwargs.get("reasoning_effort")
    chosen = effort_of(effort, f"{param}.reasoning_effort")
    for name in SWITCHES:
        switch = kwargs.get(name)
        if not isinstance(switch, bool | None):
            raise invalid(f"{param}.{name}", "neither true nor false")
        if switch is not None and chosen.on not in (None, switch):
            raise invalid(f"{param}.{name}", f"contradicts the effort {effort}")
        if switch is not None:
            chosen = ThinkingChoice(switch, chosen.effort)
    return chosen, param


def _modern(message: Message) -> Message:
    """The message with `function_call` as a tool call, and with a refusal as its content if it has none."""
    made = {name: value for name, value in message.items() if name not in OLDER}
    if (call := message.get("function_call")) is not None:
        made["tool_calls"] = [{"type": "function", "function": call}]
    if message.get("refusal") and not message.get("content"):
        made["content"] = message["refusal"]
    return made


def _with_images(message: Message, where: str) -> Message:
    """The message with its images as `ImageReader` takes them."""
    content = message.get("content")
    if not isinstance(content, list) or message["role"] not in SHOWN:
        return message
    parts = [
        chat_image(part, f"{where}.content[{at}]") if is_image(part, "image_url") else part
        for at, part in enumerate(content)
    ]
    return message | {"content": parts}


def _check_part(part: Any, where: str, sees: bool) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise invalid(where, "a part is neither text nor an object")
    kind = part.get("type", "text")
    if sees and kind == "image_url":
        return
    if kind not in TEXT_PARTS:
        raise invalid(where, f"this model reads text here, not {kind}")
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(name), str):
        raise invalid(where, "the text of a part is not a string")
    check_fields(part, REFUSAL_PART if kind == "refusal" else TEXT_PART, where)


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise invalid(where, "not a list of function calls")
    for at, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise invalid(f"{where}[{at}]", "not a function call")
        check_fields(call, CHAT_CALL, f"{where}[{at}]")
        check_fields(call["function"], CALLED, f"{where}[{at}].function")


class Chat:
    """The dialect of `/v1/chat/completions`."""

    prefix = "chatcmpl-"

    def __init__(self, renderer: ChatRenderer, model_name: str) -> None:
        self._renderer = renderer
        self._model_name = model_name

    async def read(self, caller: Caller, body: bytes, heavy: bool) -> ParsedRequest:
        return await worked(caller.payer, body, self._read, body)

    def _read(self, body: bytes) -> ParsedRequest:
        request = decode_body(body, ChatRequest, self._renderer.context_length)
        check(request)
        return ParsedRequest(
            calls=[call_of(self._renderer, request)],
            responder=ChatResponder(self._renderer, request, request.model or self._model_name),
            n=request.n or 1,
            stream=bool(request.stream),
            model=request.model,
            metadata=request.metadata,
        )

    def error(self, error: ApiError) -> bytes:
        return encode(error.body)


def check(request: ChatRequest) -> None:
    """Raises InvalidRequest for a value that the contract forbids or that this gateway does not support."""
    check_sampling(request)
    check_metadata(request.metadata)
    refuse_unserved(request, CHAT)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def call_of(renderer: ChatRenderer, request: ChatRequest) -> Call:
    """The call that the request asks for. Raises InvalidRequest for an unenforceable constraint."""
    asked = sampling_of(request, renderer.config.vocab_size)
    asked |= verbosity_of(request.verbosity, "verbosity")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if limit is not None:
        asked["max_tokens"] = limit
    thinking, param = thinking_of(request)
    renderer, options = renderer.thinking(thinking, param)
    messages, begun = begun_of(request, conversation(request.messages, renderer.vision is not None))
    tools, choice, parallel = tools_of(request, renderer.family)
    form, form_param = form_of(request)
    constrain = partial(
        constraint_of,
        tools=tools,
        tool_choice=choice,
        response_format=form,
        parallel_tool_calls=parallel,
        format_param=form_param,
    )
    constraint = constrain(renderer)
    if begun:
        refuse_constrained(constraint, "continue_final_message")
    return Call(
        messages=messages,
        begun=begun,
        tools=shown_tools(renderer, tools, choice),
        asked=asked | constraint.asked | thinking.asked,
        thinking=options,
        stop=stop_strings(request.stop),
        stream=bool(request.stream),
        top_logprobs=request.top_logprobs or 0,
        structural_tag=constraint.structural_tag,
        constrain=constrain if constraint.structural_tag else None,
        user=user_named(request.user),
    )


class ChatResponder:
    """Writes the reply to one chat request."""

    def __init__(self, renderer: ChatRenderer, request: ChatRequest, model: str) -> None:
        self._renderer = renderer
        self._request = request
        self._model = model

    def body(self, recorded: Sequence[RecordedAnswer]) -> bytes:
        generations = [each.generation for each in recorded]
        first, with_ids = generations[0], self._request.return_token_ids
        completion = ChatCompletion(
            id=first.completion_id,
            created=int(first.started_at),
            model=self._model,
            choices=[self._choice(index, each) for index, each in enumerate(recorded)],
            usage=usage_of(generations, len(generations)),
            prompt_token_ids=first.prompt.prompt_ids.tolist() if with_ids else UNSET,
        )
        return encode(completion)

    def _choice(self, index: int, recorded: RecordedAnswer) -> ChatChoice:
        generation, turn, answer = recorded
        logprobs = None
        if self._request.logprobs:
            logprobs = ChatLogprobs(logprobs_of(self._renderer, generation, range(len(generation.ids))))
        return ChatChoice(
            index=index,
            message=message_of(answer, bool(self._request.functions)),
            logprobs=logprobs,
            finish_reason=finish_of(turn.finish, bool(self._request.functions)),
            token_ids=generation.ids if self._request.return_token_ids else UNSET,
        )

    def events(self, generations: Sequence[Generation]) -> "ChatEvents":
        return ChatEvents(self._renderer, self._request, self._model, generations)


class ChatEvents:
    """The chunks of one streamed reply, as server-sent events.

    The fields that every chunk repeats are encoded once; for a chunk of text only its string is encoded.
    """

    heartbeat = HEARTBEAT

    def __init__(
        self, renderer: ChatRenderer, request: ChatRequest, model: str, generations: Sequence[Generation]
    ) -> None:
        self._renderer = renderer
        self._generations = generations
        self._with_ids = bool(request.return_token_ids)
        self._with_logprobs = bool(request.logprobs)
        self._with_functions = bool(request.functions)
        self._with_usage = bool(request.stream_options and request.stream_options.include_usage)
        first = generations[0]
        envelope = ChunkEnvelope(id=first.completion_id, created=int(first.started_at), model=model)
        self._head = b"data: " + encode(envelope)[:-1] + b","
        choice = b'"choices":[{"index":%d,"delta":{"%s":'
        self._text = [
            (self._head + choice % (index, b"content"), self._head + choice % (index, b"reasoning_content"))
            for index in range(len(generations))
        ]

    def opening(self) -> bytes:
        """The roles, in the order of choices: clients expect them in the first chunk of each choice."""
        delta = ChatDelta(role="assistant", content="")
        choices = [ChunkChoice(index=index, delta=delta) for index in range(len(self._generations))]
        return b"".join([self._chunk(choice) for choice in choices])

    def piece(self, index: int, deltas: Sequence[Delta], tokens: range) -> bytes:
        events = b"".join([self._delta(index, delta) for delta in deltas])
        if self._with_logprobs and tokens:
            logprobs = ChatLogprobs(logprobs_of(self._renderer, self._generations[index], tokens))
            events += self._chunk(ChunkChoice(index=index, logprobs=logprobs))
        return events

    def _delta(self, index: int, delta: Delta) -> bytes:
        if delta.tool_call is not None:
            return self._chunk(ChunkChoice(index=index, delta=self._call(delta.tool_call, delta.index)))
        content, reasoning = self._text[index]
        head = reasoning + encode(delta.reasoning) if delta.reasoning else content + encode(delta.content)
        return head + b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def _call(self, call: ToolCall, number: int) -> ChatDelta:
        if self._with_functions:
            return ChatDelta(function_call=FunctionCall(call.name, call.arguments))
        return ChatDelta(tool_calls=[tool_call_of(call, number)])

    def closing(self, index: int, recorded: RecordedAnswer) -> bytes:
        generation, finish = recorded.generation, finish_of(recorded.turn.finish, self._with_functions)
        if not self._with_ids:
            return self._chunk(ChunkChoice(index=index, finish_reason=finish))
        choice = ChunkChoice(index=index, finish_reason=finish, token_ids=generation.ids)
        return self._chunk(choice, generation.prompt.prompt_ids.tolist())

    def ending(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if self._with_usage:
            usage = usage_of(self._generations, len(self._generations))
            return self._event(ChunkFields(choices=(), usage=usage)) + done
        return done

    def failing(self, error: ApiError) -> bytes:
        return event(encode(error.body))

    def _chunk(self, choice: ChunkChoice, prompt_ids: list[int] | UnsetType = UNSET) -> bytes:
        return self._event(ChunkFields(choices=(choice,), prompt_token_ids=prompt_ids))

    def _event(self, fields: ChunkFields) -> bytes:
        return self._head + encode(fields)[1:] + b"\n\n"
