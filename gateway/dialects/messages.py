"""`/v1/messages`: reads Anthropic's requests and writes their answers, whole or as a stream."""

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from gateway.callers.identity import Caller, user_in_metadata
from gateway.dialects.base import ParsedRequest, RecordedAnswer
from gateway.dialects.body_decoding import decode_body
from gateway.dialects.fields import MESSAGES, check_metadata, refuse_unserved
from gateway.dialects.messages_input import (
    carrying,
    choice_of,
    conversation,
    format_of,
    left_out_of,
    omits_thoughts,
    read_thoughts,
    thinking_of,
    tools_of,
)
from gateway.dialects.messages_wire import (
    AnthropicMessage,
    BlockDelta,
    BlockGrowth,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputDelta,
    MessageDelta,
    MessageEvent,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    Sign,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    input_of,
)
from gateway.dialects.wire import (
    check_sampling,
    encode,
    event,
    given_fields,
    left_out,
    refuse_constrained,
    split_begun,
    stop_strings,
)
from gateway.errors import invalid
from gateway.generations.generation import Call, Generation
from gateway.language.chat_messages import in_call_order
from gateway.language.constraint import constraint_of, shown_tools
from gateway.language.deltas import Delta
from gateway.language.parsed_answer import ToolCall
from gateway.language.render import ChatRenderer
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import worked

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "max_tokens")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Error details that tell Anthropic's SDK to send whole conversations."""


class Messages:
    """The dialect of `/v1/messages`."""

    prefix = "msg_"

    def __init__(self, renderer: ChatRenderer, model_name: str, sign: Sign) -> None:
        self._renderer, self._model_name, self._sign = renderer, model_name, sign

    def prompt_of(self, request: MessagesRequest) -> Call:
        """The call with its prompt only. Raises InvalidRequest, also for a wrongly signed thought."""
        read_thoughts(request, self._sign)
        conversed = conversation(request, self._renderer.vision is not None)
        messages, begun = split_begun(conversed, f"messages[{len(request.messages) - 1}]")
        thinking, param = thinking_of(request)
        _, options = self._renderer.thinking(thinking, param)
        return Call(
            messages=in_call_order(messages),
            tools=tools_of(request),
            asked=thinking.asked,
            thinking=options,
            begun=begun,
        )

    async def read(self, caller: Caller, body: bytes, heavy: bool) -> ParsedRequest:
        return await worked(caller.payer, body, self._read, body)

    def _read(self, body: bytes) -> ParsedRequest:
        request = request_of(body, self._renderer.context_length)
        if request.max_tokens is None:
            raise invalid("max_tokens", "give a limit for the answer")
        check_sampling(request)
        model, shows_ids = request.model or self._model_name, bool(request.return_token_ids)
        return ParsedRequest(
            calls=[call_of(self._renderer, request, self.prompt_of(request))],
            responder=MessagesResponder(model, shows_ids, self._sign, omits_thoughts(request)),
            stream=bool(request.stream),
            model=request.model,
            metadata=request.metadata,
        )

    def error(self, error: ApiError) -> bytes:
        body = error.body
        if error.param == "thread":
            body["error"]["details"] = NO_THREADS
        return encode({"type": "error", **body})


def request_of(body: bytes, context_length: int = 0) -> MessagesRequest:
    """Decode a body. Raises InvalidRequest for a malformed body, or a `thread` in place of all messages."""
    request = decode_body(body, MessagesRequest, context_length)
    if request.thread is not None:
        raise invalid("thread", "this gateway keeps no threads; send all messages")
    refuse_unserved(request, MESSAGES)
    check_metadata(request.metadata)
    return request


def call_of(renderer: ChatRenderer, request: MessagesRequest, prompt: Call) -> Call:
    """The call that the request asks for, with its `prompt`. Raises InvalidRequest."""
    thinking, _ = thinking_of(request)
    renderer = renderer.variant(prompt.thinking)
    tools, choice = prompt.tools, choice_of(request.tool_choice)
    output_format, param = format_of(request)
    single = bool((request.tool_choice or {}).get("disable_parallel_tool_use"))
    constrain = partial(
        constraint_of,
        tools=tools,
        tool_choice=choice,
        response_format=output_format,
        parallel_tool_calls=not single,
        format_param=param,
    )
    constraint = constrain(renderer)
    if prompt.begun:
        refuse_constrained(constraint, "messages")
    return msgspec.structs.replace(
        prompt,
        tools=shown_tools(renderer, tools, choice),
        asked=given_fields(request, SAMPLING_FIELDS)
        | constraint.asked
        | thinking.asked
        | left_out(left_out_of(request)),
        stop=stop_strings(request.stop_sequences),
        stream=bool(request.stream),
        structural_tag=constraint.structural_tag,
        constrain=constrain if constraint.structural_tag else None,
        user=user_in_metadata(request.metadata or {}),
    )


class MessagesResponder:
    """Writes the reply to one request."""

    def __init__(self, model: str, with_ids: bool, sign: Sign, omit: bool) -> None:
        self._model = model
        self._with_ids = with_ids
        self._sign = sign
        self._omit = omit
        """Whether the client sees no thoughts, only their signatures."""

    def body(self, recorded: Sequence[RecordedAnswer]) -> bytes:
        generation, _, answer = recorded[0]
        content: list[ContentBlock] = []
        if answer.reasoning is not None:
            content.append(thinking_block(answer.reasoning, self._sign, self._omit))
        if answer.content:
            content.append(TextBlock(answer.content))
        content += [ToolUseBlock(call.call_id, call.name, input_of(call)) for call in answer.tool_calls]
        stopped = _stopped(recorded[0])
        prompt_ids, output_ids = _ids(generation, self._with_ids)
        message = AnthropicMessage(
            id=generation.completion_id,
            model=self._model,
            content=content,
            stop_reason=stopped.stop_reason,
            stop_sequence=stopped.stop_sequence,
            usage=_usage(generation),
            prompt_token_ids=prompt_ids,
            token_ids=output_ids,
        )
        return encode(message)

    def events(self, generations: Sequence[Generation]) -> "MessagesEvents":
        return MessagesEvents(generations[0], self._model, self._with_ids, self._sign, self._omit)


class MessagesEvents:
    """The events of one streamed message. One content block after another begins, grows and ends."""

    heartbeat = event(b'{"type":"ping"}', b"ping")

    def __init__(self, generation: Generation, model: str, with_ids: bool, sign: Sign, omit: bool) -> None:
        self._generation = generation
        self._model = model
        self._with_ids = with_ids
        self._sign = sign
        self._omit = omit
        self._thought: list[str] = []
        """The text of the open thought."""
        self._index = -1
        self._open: type[ContentBlock] | None = None
        """The kind of the open block; None if no block is open."""

    def opening(self) -> bytes:
        message = AnthropicMessage(
            id=self._generation.completion_id,
            model=self._model,
            usage=_usage(self._generation),
        )
        return _event(MessageStart(message)) + self.heartbeat

    def piece(self, index: int, deltas: Sequence[Delta], tokens: range) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def _delta(self, delta: Delta) -> bytes:
        if delta.tool_call is not None:
            return self._tool_use(delta.tool_call)
        if delta.reasoning:
            begun = self._begin(ThinkingBlock(""))
            self._thought.append(delta.reasoning)
            return begun if self._omit else begun + self._grow(ThinkingDelta(delta.reasoning))
        return self._begin(TextBlock("")) + self._grow(TextDelta(delta.content))

    def _tool_use(self, call: ToolCall) -> bytes:
        begun = self._end() + self._begin(ToolUseBlock(call.call_id, call.name, {}))
        return begun + self._grow(InputDelta(encode(input_of(call)).decode())) + self._end()

    def _begin(self, block: ContentBlock) -> bytes:
        """Begin a block, unless one of its kind is open."""
        if self._open is type(block):
            return b""
        ended = self._end()
        self._open = type(block)
        self._index += 1
        return ended + _event(BlockStart(self._index, block))

    def _grow(self, growth: BlockGrowth) -> bytes:
        return _event(BlockDelta(self._index, growth))

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is ThinkingBlock:
            block = thinking_block("".join(self._thought), self._sign, self._omit)
            signed = self._grow(SignatureDelta(block.signature))
            self._thought.clear()
        self._open = None
        return signed + _event(BlockStop(self._index))

    def closing(self, index: int, recorded: RecordedAnswer) -> bytes:
        prompt_ids, output_ids = _ids(recorded.generation, self._with_ids)
        delta = MessageDelta(
            delta=_stopped(recorded),
            usage=_usage(recorded.generation),
            prompt_token_ids=prompt_ids,
            token_ids=output_ids,
        )
        return self._end() + _event(delta)

    def ending(self) -> bytes:
        return _event(MessageStop())

    def failing(self, error: ApiError) -> bytes:
        return event(encode({"type": "error", **error.body}), b"error")


def thinking_block(thought: str, sign: Sign, omit: bool) -> ThinkingBlock:
    return ThinkingBlock("", carrying(thought, sign)) if omit else ThinkingBlock(thought, sign(thought))


def _stopped(recorded: RecordedAnswer) -> StopDelta:
    generation, turn, _ = recorded
    if generation.matched is not None:
        return StopDelta("stop_sequence", generation.matched)
    return StopDelta(STOP_REASONS[turn.finish], None)


def _usage(generation: Generation) -> MessageUsage:
    """The tokens so far."""
    cached = generation.cached_tokens
    uncached = len(generation.prompt.prompt_ids) - cached
    return MessageUsage(uncached, len(generation.ids), cache_read_input_tokens=cached)


def _ids(generation: Generation, wanted: bool) -> tuple[list[int] | UnsetType, list[int] | UnsetType]:
    """The token ids of prompt and answer; UNSET if the request does not ask for them."""
    if not wanted:
        return UNSET, UNSET
    return generation.prompt.prompt_ids.tolist(), generation.ids


def _event(each: MessageEvent) -> bytes:
    return event(encode(each), str(each.__struct_config__.tag).encode())
